"""One small handler for each API: it states the contract, asks the domain objects and fills in the response."""
