//! Input that nobody sane sends. Seeds lie in `tests/fuzz/corpus` of the repository; every one is tried as it is, then
//! cut, flipped, repeated and spliced by proptest. A short run belongs to the tests; `FUZZ_CASES` makes it a long one
//! (`make fuzz`). What fails is kept: proptest's seed in `tests/fuzz/regressions.txt`, the input as a file of the corpus.

#[path = "../front/world.rs"]
#[allow(dead_code, reason = "made for the tests of the front, which use all of it")]
mod world;

mod front;
mod kv;
mod readers;
mod seeds;
mod templates;
