"""Token files that people have already, read and written byte for byte.

    megatron    NAME.bin and NAME.idx (Megatron-LM, NeMo), also with modes; fairseq's older index
    llm.c       a header of 256 i32, then u16 or u32 (llm.c, modded-nanogpt)
    numpy       a true .npy file of one dimension
    raw         bare ids (nanoGPT's .bin, OLMo's .npy without a header): the width has to be said
    datatrove   NAME.ds and NAME.ds.index
    mds         MosaicML's shards: one column of tokens is read, sample by sample

Each file but those of the last is a run of ids (`TokenFile`), and where the format knows documents, where they end.
What is opened is checked: magic, version, type, every size, and that files that belong together fit. All numbers are
little-endian.
"""
