"""The parameter-synchronization job: reduce-scatter, update, publish, slice by slice."""
