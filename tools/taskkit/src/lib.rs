#![forbid(unsafe_code)]
//! Parts that Ringfence's build tasks share: `cargo xtask` and the laboratory of emulated machines (`vm-lab`).
//!
//! * [`exec`] prints and runs commands, and counts the tests of a test run.
//! * [`tools`] finds and installs the programs that a task needs.
//! * [`tree`] collects the files of a package or an archive; [`deb`] makes Debian packages.
//! * [`text`] formats numbers and durations for reports.
//!
//! A task never changes anything outside cargo's target directory, except that [`tools::Toolbox::install`] installs
//! packages where it may.

pub mod deb;
pub mod exec;
pub mod text;
pub mod tools;
pub mod tree;
