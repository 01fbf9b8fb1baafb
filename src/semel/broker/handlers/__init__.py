"""One small handler for each API: it states the contract, calls the domain objects and fills in the response."""
