"""Read ``build_matrix.yaml`` into a :class:`Matrix`, or say everything that is wrong with it."""

from __future__ import annotations

from pathlib import Path

from dsops_builder.faults import Faults
from dsops_builder.model import Matrix
from dsops_builder.ops import collect_ops
from dsops_builder.references import check_references
from dsops_builder.shape import check_shape
from dsops_builder.yamlfile import read_yaml

FILE_NAME = "build_matrix.yaml"


def load_matrix(path: Path) -> Matrix:
    """Return the matrix of the file ``path``, whose rows may name the ops of the folder ``ops`` beside it.

    Raises one :class:`MatrixError` that lists every fault of the file and of the ops' descriptors, one a line:
    ``build_matrix.yaml:LINE: rows.1_cu118.pairings[0].torch: found ..., accepted ..., did you mean ...?``
    """
    faults = Faults()
    file = read_yaml(path, faults)
    matrix = None
    if file is not None:
        matrix = check_shape(Matrix, file, faults)
        check_references(file, collect_ops(path.parent / "ops", faults), faults)
    return faults.settle(matrix)
