from tests.trainers.conftest import toy

__all__ = ["toy"]
