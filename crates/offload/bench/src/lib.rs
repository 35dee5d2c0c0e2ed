#![forbid(unsafe_code)]
//! Benchmarks only: see `benches/`.
