"""Packages that a process is not to find, whatever the machine has: neither the modules nor what says which version."""

import importlib.machinery
import sys


def hide(*packages: str) -> None:
    """From here on; what was imported before stays. A distribution has its package's name."""

    class Finder(importlib.machinery.PathFinder):
        """Python's own finder of what lies in the folders of sys.path, for all other packages."""

        @classmethod
        def find_spec(cls, fullname, path=None, target=None):
            return None if fullname.partition(".")[0] in packages else super().find_spec(fullname, path, target)

        @staticmethod
        def find_distributions(*context):
            for found in importlib.machinery.PathFinder.find_distributions(*context):
                if found._normalized_name not in packages:  # of the file's name: the metadata may not be whole
                    yield found

    at = sys.meta_path.index(importlib.machinery.PathFinder)
    sys.meta_path[at] = Finder
