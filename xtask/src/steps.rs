//! Steps of `cargo xtask test`: a table, and one function for each step.
//!
//! The default set runs before each commit and takes minutes. The long set has everything else; its steps have parts that run,
//! fail and are recorded one by one ([`crate::run`], [`crate::record`]).
//!
//! To add a step, write its function and add a row to [`STEPS`]. A step whose `needs` are missing is
//! reported as SKIPPED, with the way to install them. Missing parts of the checkout (no test ran, no fuzz
//! target exists) are a failure: otherwise a renamed file would remove a check unnoticed.

mod cargo_install;
mod checks;
mod empty_path;
mod others;
mod packaging;
mod places;
mod tests;

use taskkit::tools::{self, Tool};

use crate::context::{Context, Ended};
use crate::fresh;

pub(crate) use tests::{all_orders, unit_orders};

/// Step of the test run, in one of the sets or in both.
pub(crate) struct Step {
    /// Name for `--only` and `--skip`.
    pub(crate) name: &'static str,
    /// Description of the checks.
    pub(crate) title: &'static str,
    /// Tools without which the step cannot run.
    pub(crate) needs: &'static [&'static Tool],
    /// Work of the step in the default set.
    pub(crate) default: Option<fn(&Context) -> anyhow::Result<Ended>>,
    /// Work of the step in the long set.
    pub(crate) long: Option<Long>,
}

/// Work of a step in the long set.
pub(crate) struct Long {
    /// Returns the names of the parts. The name of the only part of a step is empty.
    pub(crate) parts: fn(&Context) -> anyhow::Result<Vec<String>>,
    /// Runs one part.
    pub(crate) run: fn(&Context, &str) -> anyhow::Result<Ended>,
}

impl Long {
    /// Creates the work of a step with a single part.
    const fn whole(run: fn(&Context, &str) -> anyhow::Result<Ended>) -> Option<Long> {
        Some(Long { parts: |_| Ok(vec![String::new()]), run })
    }
}

/// All steps in the order of their execution, fast ones first.
pub(crate) static STEPS: &[Step] = &[
    Step {
        name: "fmt",
        title: "formatting (rustfmt)",
        needs: &[&tools::RUSTFMT],
        default: Some(checks::fmt),
        long: None,
    },
    Step {
        name: "tidy",
        title: "the project's rules for the sources (xtask/tidy.toml has the exceptions)",
        needs: &[],
        default: Some(checks::tidy),
        long: None,
    },
    Step {
        name: "deny",
        title: "licences, banned crates and sources of the dependencies",
        needs: &[&tools::CARGO_DENY],
        default: Some(checks::deny),
        long: Long::whole(|context, _| checks::deny(context)),
    },
    Step {
        name: "advisories",
        title: "known vulnerabilities in the dependencies (fetches the RustSec database)",
        needs: &[&tools::CARGO_DENY],
        default: None,
        long: Long::whole(|context, _| checks::advisories(context)),
    },
    Step {
        name: "clippy",
        title: "lints, warnings denied, all targets",
        needs: &[&tools::CLIPPY],
        default: Some(checks::clippy),
        long: None,
    },
    Step {
        name: "doc",
        title: "the documentation, warnings denied; in the long set, its examples",
        needs: &[],
        default: Some(checks::doc),
        long: Long::whole(|context, _| tests::examples(context)),
    },
    Step {
        name: "build",
        title: "all test programs, in one build (profile `suite`)",
        needs: &[],
        default: Some(tests::build),
        long: None,
    },
    Step {
        name: "unit",
        title: "unit, property and conformance tests of every crate; nothing installed is needed",
        needs: &[],
        default: Some(tests::unit),
        long: Some(Long { parts: tests::unit_parts, run: tests::long_part }),
    },
    Step {
        name: "local",
        title: "the ringfence command and disks, end to end: real processes, real kernel TCP, real NBD \
                clients and servers",
        needs: &[],
        default: Some(tests::local),
        long: Some(Long { parts: tests::local_parts, run: tests::long_part }),
    },
    Step {
        name: "vm",
        title: "real Xen with its guests, and a plain kernel, under emulation (`cargo xtask vm`)",
        needs: vm_lab::NEEDS,
        default: Some(others::vm_short),
        long: Some(Long { parts: |_| Ok(vec!["xen".into(), "linux".into()]), run: others::vm }),
    },
    Step {
        name: "loom",
        title: "the lock-free protocols, in every interleaving of their threads (loom)",
        needs: &[],
        default: None,
        long: Some(Long { parts: tests::loom_parts, run: tests::loom }),
    },
    Step {
        name: "attack",
        title: "the attack suite as an ordinary user, which root becomes",
        needs: &[],
        default: None,
        long: Some(Long { parts: tests::attack_parts, run: tests::attack }),
    },
    Step {
        name: "empty-path",
        title: "the step `local` with a PATH that has nothing but what each test asked for",
        needs: &[],
        default: None,
        long: Some(Long { parts: empty_path::parts, run: empty_path::run }),
    },
    Step {
        name: "place",
        title: "some tests from a checkout below /tmp, with blanks in its path, on a tmpfs, and read-only",
        needs: &[],
        default: None,
        long: Some(Long { parts: places::parts, run: places::run }),
    },
    Step {
        name: "fuzz-smoke",
        title: "every fuzz target for a few seconds (`unit` has the same bodies as property tests)",
        needs: &[&tools::CARGO_FUZZ, &tools::NIGHTLY],
        default: None,
        long: Long::whole(|context, _| others::fuzz_smoke(context)),
    },
    Step {
        name: "clients",
        title: "Podman, RootlessKit, QEMU and libvirt with Ringfence as pasta and passt (`cargo xtask clients`)",
        needs: &[&tools::DEBOOTSTRAP],
        default: None,
        long: Some(Long { parts: others::client_parts, run: others::clients }),
    },
    Step {
        name: "fresh",
        title: "both commands of the README in a new Debian system, as an ordinary user and as root",
        needs: &[&tools::DEBOOTSTRAP],
        default: None,
        long: Some(Long { parts: fresh::parts, run: fresh::run }),
    },
    Step {
        name: "package",
        title: "Debian packages, installed, used and removed (`cargo xtask package --try`); crates (`cargo package`, \
                `cargo install`) and archives (`cargo xtask dist`), which two builds make equal",
        needs: &[
            &tools::DEBOOTSTRAP,
            &tools::LINTIAN,
            &tools::RPMBUILD,
            &tools::RPMLINT,
            &tools::CHECKMODULE,
            &tools::SEMODULE_PACKAGE,
            &tools::XZ,
            &tools::ZIP,
            &tools::ZSTD,
        ],
        default: None,
        long: Some(Long { parts: packaging::parts, run: packaging::run }),
    },
];

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn steps_have_distinct_names_and_a_set() {
        let mut names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STEPS.len());
        assert!(STEPS.iter().all(|step| step.default.is_some() || step.long.is_some()));
    }
}
