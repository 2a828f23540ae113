"""The user's own modules on the executors: present, and with the same code as in the driver.

Anything that can be imported is pickled by name, so a worker imports the module itself. It may find
none, or another file. A worker that stays alive keeps what it once imported, even if the module was
edited and reloaded since. :func:`accompanied` therefore sends, with a value, the list of the user's
modules behind it and digests of their functions. On arrival, before anything is looked up by name:

* Modules that differ from the driver's, or whose files have changed, are imported again.
* A module that is not found is looked for at the driver's path: in local mode that is the same disk.
* If a module is still missing or has other code, :class:`sparkdl.ModelError` is raised.

Values that were assigned to a module in the driver's process do not reach the others.

Modules of libraries (``site-packages``) are left alone, and so is anything that travels by value.
"""

from sparkdl.usercode.travel import accompanied

__all__ = ["accompanied"]
