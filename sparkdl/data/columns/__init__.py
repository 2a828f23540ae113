"""The conversion of a DataFrame's columns into tensors, a file for each type of column."""

from sparkdl.data.columns import convert as convert
from sparkdl.data.columns import image as image
from sparkdl.data.columns import masked as masked
from sparkdl.data.columns import numeric as numeric
from sparkdl.data.columns import sequence as sequence
from sparkdl.data.columns import sparse as sparse
from sparkdl.data.columns import text as text
