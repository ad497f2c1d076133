"""Reports for people: plans as pictures, and what this machine can run."""
