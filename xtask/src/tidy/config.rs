//! Exceptions from the rules, and the packages with privileges.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Path of the file with the exceptions.
pub(super) const CONFIG: &str = "xtask/tidy.toml";

/// Packages that may use `unsafe` and atomics: the crates in which two domains access the same memory, the
/// crate of the kernel interfaces, and two tools.
pub(super) const TRUSTED: [&str; 6] = [
    "crates/memory/",
    "crates/ring/",
    "crates/sys/",
    "crates/platform/",
    // System calls of an adversary and rings written by hand; ioctls of VFIO. Neither is in a product.
    "tools/testkit/",
    "tools/iommu-lab/",
];

/// Exceptions from the words: the replaced words that each file may use, with the reason.
pub(super) type Words = BTreeMap<String, BTreeMap<String, String>>;

/// Exceptions from the rules.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Config {
    /// Files over the limit, and their number of lines.
    pub(super) files: BTreeMap<String, usize>,
    /// Functions over the limit, as `path::Type::name`, and their number of lines.
    pub(super) functions: BTreeMap<String, usize>,
    /// Files that use atomics, and the reason.
    pub(super) atomics: BTreeMap<String, String>,
    /// Files that may use words replaced by the glossary: the words, and the reason.
    #[serde(default)]
    pub(super) words: Words,
    /// Last commit that the rule about subjects leaves out.
    #[serde(default)]
    pub(super) commits_after: Option<String>,
}
