"""PostgreSQL: what everything that writes to it stands on. psycopg 3 is loaded when the first connection is made.

errors.py       psycopg's errors, sorted once by what the caller can do about them
database.py     a DSN whose password nobody sees, and connections
session.py      transactions whose outcome is always known, also when the connection breaks during COMMIT
tables.py       semel's own tables: created on first use, versioned; names are quoted. Owner rows: a name belongs to one
                generation at a time, checked inside the owner's transactions
offsets.py      where to read on: offsets beside the data

rows.py         rows to SQL, for the loop                        columns.py  Arrow tables, for the loop
target.py       the table that rows go to                        binary_copy.py  Arrow columns as binary COPY
staging.py      staging tables of attempts, for Spark            moving.py  their rows into the table
decisions.py    which transaction of Kafka is decided            outbox_table.py  the outbox as a table
settings.py     `semel.Postgres`, and the rows that functions return
"""
