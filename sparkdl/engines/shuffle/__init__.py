"""The shuffle engine: each iteration is a forward-backward and a parameter-synchronization job."""
