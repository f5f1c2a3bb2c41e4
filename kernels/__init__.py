"""The ops of the decoder. The same op names in every backend; `reference` (plain torch) is what they mean."""
