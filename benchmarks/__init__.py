"""Measurements on one GPU: rows of (operation, case, provider), each behind a parity gate."""
