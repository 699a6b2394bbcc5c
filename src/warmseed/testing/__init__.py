"""What a third party needs to test its own store: the conformance suite and a store of programmable faults.

    from warmseed.testing.store_contract import Medium, StoreContract

    class TestMyStore(StoreContract):
        @asynccontextmanager
        async def medium(self, folder): ...

Needs pytest. Add ``pytest.register_assert_rewrite("warmseed.testing.store_contract")`` to a ``conftest.py`` to see
the compared values of a failing check.
"""
