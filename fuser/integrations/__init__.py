"""Other libraries that use fuser's ops; each file needs the library of its name."""
