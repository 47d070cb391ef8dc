"""The intermediate representation: programs, cuts and routes as data, with a text form and digests."""
