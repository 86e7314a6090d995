"""Facts about a program that are computed once and asked by all: uses, memory, streams."""
