#![forbid(unsafe_code)]
//! Layouts and numbers of Xen's PV interfaces. Bytes in, values or errors out; no I/O.

pub mod grant;
