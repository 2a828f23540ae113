"""Collective algorithms between ranks, their costs, a parameter server and a dependency engine.

May import: ``errors`` and ``plain``. Must not know: Spark, and how the ranks were started.
"""

from sparkdl.collectives.communicator import Communicator
from sparkdl.collectives.engine import Engine
from sparkdl.collectives.parameter_server import KVStore, ParameterServer

__all__ = ["Communicator", "Engine", "KVStore", "ParameterServer"]
