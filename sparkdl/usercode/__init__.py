"""The user's own modules on the executors: there, and of the same code as in the driver's process.

What can be imported is pickled by name. So a worker imports the module for itself: it may find none, or
another file; and a worker that lives has what it once imported, though the module was edited and
reloaded since. :func:`accompanied` sends along which modules of the user's stand behind a value, and
what their functions are. Where the value arrives, before anything of it is looked up by name,

* modules that are not what the driver has, or whose files have changed, are imported anew;
* a module that is not found is looked for where the driver has it: in local mode that is the same disk;
* what then is still missing, or other code, is a :class:`sparkdl.ModelError`.

Modules of libraries (``site-packages``) are left alone, and so is what travels by value.
"""

from sparkdl.usercode.travel import accompanied

__all__ = ["accompanied"]
