//! Choice of the hypervisor and the Debian releases by the command line and by the scenarios.

use std::path::{Path, PathBuf};

use crate::apt::Release;
use crate::args::{LinuxArgs, XenArgs};
use crate::build::BuildTools;
use crate::hypervisor;
use crate::scenario::Scenario;
use crate::window_xen::{self, Variant};

/// Hypervisor that the user chose.
#[derive(Default)]
pub(crate) struct Choice {
    file: Option<PathBuf>,
    /// Debian release, if it differs from this computer's.
    pub(crate) release: Option<Release>,
    /// Debian release of QEMU, if it differs from this computer's.
    pub(crate) emulator: Option<Release>,
    pub(crate) debug: bool,
    /// Set for the one with grant windows.
    windows: bool,
    /// Guards of grant windows that are taken out.
    without: Option<u32>,
}

impl Choice {
    /// Returns the choice of the command line. Fails if the release of this computer is not known.
    pub(crate) fn of(args: &XenArgs) -> anyhow::Result<Choice> {
        Ok(Choice {
            file: args.hypervisor.clone(),
            release: args.suite.map(Release::other).transpose()?.flatten(),
            debug: args.debug_xen,
            windows: args.window_xen || args.without_guards.is_some(),
            without: args.without_guards,
            emulator: None,
        })
    }

    /// Returns the choice of the command line for machines without Xen. Fails if the release of this computer is not known.
    pub(crate) fn of_linux(args: &LinuxArgs) -> anyhow::Result<Choice> {
        let other =
            |suite: Option<Release>| anyhow::Ok(suite.map(Release::other).transpose()?.flatten());
        Ok(Choice { release: other(args.suite)?, emulator: other(args.qemu)?, ..Choice::default() })
    }

    /// Returns words for the command line of the hypervisor.
    pub(crate) fn options(&self) -> String {
        self.without.map(|sum| format!(" window_without={sum}")).unwrap_or_default()
    }

    /// Returns the ELF file for these scenarios, built if it has to be; `None` for Debian's.
    pub(crate) fn elf(
        self,
        root: &Path,
        cache: &Path,
        tools: BuildTools<'_>,
        selected: &[Scenario],
    ) -> anyhow::Result<Option<PathBuf>> {
        if let Some(file) = self.file {
            return Ok(Some(std::path::absolute(file)?));
        }
        if let Some(scenario) = selected.iter().find(|scenario| scenario.wants_guards) {
            let name = &scenario.name;
            anyhow::ensure!(
                self.without.is_some(),
                "{name} runs with --without-guards only; 0 takes none out"
            );
        }
        if self.windows || selected.iter().any(|scenario| scenario.wants_windows) {
            let variant = match (self.without, self.debug) {
                (Some(_), _) => Variant::Guards,
                (None, true) => Variant::Debug,
                (None, false) => Variant::Release,
            };
            return window_xen::elf(root, self.release, cache, tools, variant).map(Some);
        }
        self.debug.then(|| hypervisor::debug(self.release, cache, tools)).transpose()
    }
}
