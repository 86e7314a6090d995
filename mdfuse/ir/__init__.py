"""The fusion IR: values, expressions, the op table, inference, printer, verifier."""
