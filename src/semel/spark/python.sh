#!/bin/sh
# The Python that local Spark starts for semel.spark_session(): the one in SEMEL_PYTHON, with the installed pyspark.
# Spark puts its pyspark.zip first on PYTHONPATH. From a zip Python compiles every module anew in every process, which
# takes longer than a small query runs.
IFS=:
kept=
for entry in $PYTHONPATH; do
    case $entry in
        */pyspark.zip | */py4j-*-src.zip) ;;
        *) kept=${kept:+$kept:}$entry ;;
    esac
done
PYTHONPATH=$kept exec "$SEMEL_PYTHON" "$@"
