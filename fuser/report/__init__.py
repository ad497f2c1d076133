"""Reports: plans as pictures, and the doctor's report on this machine."""
