"""CuTe DSL kernels for short causal convolutions; installs as `accel.kernels` and imports nothing else of accel."""
