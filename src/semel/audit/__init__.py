"""What an application has done, by its ledger and its topics alone.

    result = audit("localhost:9092", "payments")
    for finding in result.findings:
        print(finding)

The ledger says which input each committed batch covered and what it wrote where; this reads it, looks for gaps and
overlaps, and counts the records that are really there. It shares no code with what it looks at: topics are read by
confluent-kafka, ledger entries by their documented JSON; import-linter keeps it so.
"""

from semel.audit.findings import AuditedWrite, AuditEntry, Finding, FindingKind
from semel.audit.looking import Audit, CannotLookError, audit

__all__ = ["Audit", "AuditEntry", "AuditedWrite", "CannotLookError", "Finding", "FindingKind", "audit"]
