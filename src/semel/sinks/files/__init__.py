"""Files as a sink: written aside, renamed, and visible together through numbered manifests that hold the offsets.

settings    `semel.Files`: what a program says about its folder
formats     rows and tables as Parquet and JSON lines
manifests   the log of manifests: the state of a folder, and how it changes
folder      data files: their names, how they get onto the disk, what is swept
reading     readers, and the compaction of small files
"""
