"""What the emulator raises."""


class KernelError(AssertionError):
    """A kernel that does not compile, or does something wrong when it runs."""
