"""What a backend says of itself."""

from __future__ import annotations

from rl_interfaces.contract import ContractVersionError, check_contract_version
from rl_interfaces.testing.generation import GenerationCase


def the_contracts_version_is_declared(case: GenerationCase) -> None:
    """`contract_version` of the class is one that this version of the interfaces takes."""
    backend_class = type(case.backend(max_new_tokens=1))
    try:
        check_contract_version(backend_class, owner=backend_class.__module__)
    except ContractVersionError as error:
        raise AssertionError(str(error)) from error
