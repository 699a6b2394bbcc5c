"""What a third party needs to test its own store: the conformance suite and a store of programmable faults."""
