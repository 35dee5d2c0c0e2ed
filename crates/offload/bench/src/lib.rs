#![forbid(unsafe_code)]
//! Benchmarks only, in `benches/`.
