"""PostgreSQL: what everything that writes to it stands on. psycopg 3 is loaded when the first connection is made.

errors.py       psycopg's errors, sorted once by what the caller can do about them
database.py     a DSN whose password nobody sees, and connections
session.py      transactions whose outcome is always known, also when the connection breaks during COMMIT
tables.py       semel's own tables: created on first use, versioned; names are quoted. Owner rows: a name belongs to one
                generation at a time, checked inside the owner's transactions
"""
