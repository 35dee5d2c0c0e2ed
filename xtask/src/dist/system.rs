//! Packages for systems with RPM or pacman, of the static program. Both have the same files, below `/usr` and `/etc`.

use std::path::{Path, PathBuf};

use taskkit::tree::Tree;

use crate::contents;

/// Content of the packages.
pub(super) struct SystemPackage<'a> {
    pub(super) root: &'a Path,
    pub(super) version: &'a str,
    /// Program that prints manual pages and completions.
    pub(super) program: &'a Path,
    /// Program to install, without the names and lines for debuggers.
    pub(super) stripped: &'a [u8],
    /// Names and texts of licences.
    pub(super) licences: &'a [(&'a str, String)],
    /// Bill of materials.
    pub(super) sbom: &'a str,
    /// Time of all files in seconds since 1970.
    pub(super) epoch: u64,
}

/// First line of the descriptions.
pub(super) const SUMMARY: &str = "Network interfaces and disks for guests that do not trust it";
pub(super) const URL: &str = "https://github.com/ringfence/ringfence";
pub(super) const LICENCE: &str = "Apache-2.0 OR MIT";
/// File that an upgrade does not replace if the user changed it.
pub(super) const CONFIGURATION: &str = "etc/ringfence/ringfence.toml";
/// Number of the package among those of one version.
pub(super) const RELEASE: u32 = 1;

impl SystemPackage<'_> {
    /// Collects the files in `folder`.
    pub(super) fn tree(&self, folder: PathBuf) -> anyhow::Result<Tree> {
        let tree = Tree::new(folder)?;
        tree.add("usr/bin/ringfence", 0o755, self.stripped)?;
        for name in contents::NAMES {
            tree.link(&format!("usr/libexec/ringfence/{name}"), "../../bin/ringfence")?;
        }
        contents::add_generated(&tree, "usr/share", self.program)?;
        // The directory of Debian's zsh has another name.
        let completion = tree.root().join("usr/share/zsh/vendor-completions/_ringfence");
        std::fs::rename(completion, tree.place("usr/share/zsh/site-functions/_ringfence")?)?;
        std::fs::remove_dir(tree.root().join("usr/share/zsh/vendor-completions"))?;
        contents::add_guides(&tree, "usr/share", self.root)?;
        contents::add_profiles(&tree, "usr/share", self.root)?;
        for (name, path, mode) in contents::SYSTEM_FILES {
            tree.copy(path, *mode, &self.root.join("dist").join(name))?;
        }
        for (name, text) in self.licences {
            tree.add(&format!("usr/share/licenses/ringfence/{name}"), 0o644, text)?;
        }
        tree.add("usr/share/doc/ringfence/ringfence.cdx.json", 0o644, self.sbom)?;
        tree.open_directories()?;
        tree.set_times(self.epoch)?;
        Ok(tree)
    }
}
