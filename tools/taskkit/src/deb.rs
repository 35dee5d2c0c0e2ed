//! Debian packages: a tree of files, a control file and maintainer scripts, packed by `dpkg-deb`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::exec::Cmd;
use crate::tree::Tree;

const MAINTAINER: &str = "Ringfence developers <dev@ringfence.invalid>";
const HOMEPAGE: &str = "https://github.com/ringfence/ringfence";

/// Fields of a package's control file.
pub struct Control<'a> {
    pub name: &'a str,
    pub version: &'a str,
    /// `amd64`, or `all` for a package without machine code.
    pub architecture: &'a str,
    pub section: &'a str,
    /// Further fields, such as `("Depends", "dkms")`.
    pub fields: &'a [(&'a str, &'a str)],
    /// First line of the description.
    pub synopsis: &'a str,
    /// Lines of the description, each at most 79 characters long.
    pub description: &'a [&'a str],
}

impl Control<'_> {
    fn text(&self) -> String {
        let Control { name, version, architecture, section, .. } = self;
        let mut text = format!(
            "Package: {name}\nVersion: {version}\nArchitecture: {architecture}\nSection: {section}\nPriority: optional\n\
             Maintainer: {MAINTAINER}\nHomepage: {HOMEPAGE}\n"
        );
        for (field, value) in self.fields {
            writeln!(text, "{field}: {value}").expect("a string takes all text");
        }
        writeln!(text, "Description: {}", self.synopsis).expect("a string takes all text");
        for line in self.description {
            writeln!(text, " {line}").expect("a string takes all text");
        }
        text
    }

    /// Returns the changelog that Debian requires. `time` is in the form of RFC 5322.
    fn changelog(&self, time: &str) -> String {
        let Control { name, version, .. } = self;
        format!(
            "{name} ({version}) unstable; urgency=medium\n\n  * Version {version}.\n\n -- {MAINTAINER}  {time}\n"
        )
    }

    fn file_name(&self) -> String {
        format!("{}_{}_{}.deb", self.name, self.version, self.architecture)
    }
}

/// Package under construction. Paths in it have no leading slash.
pub struct Deb {
    tree: Tree,
    configuration: String,
}

impl Deb {
    /// Starts a package. Its files are collected below `tree`, which is emptied first.
    pub fn new(tree: PathBuf) -> anyhow::Result<Deb> {
        let tree = Tree::new(tree)?;
        std::fs::create_dir(tree.root().join("DEBIAN"))?;
        Ok(Deb { tree, configuration: String::new() })
    }

    /// Returns the files of the package, configuration files included.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Returns the place of `path` before it is packed. The directory it is in exists.
    pub fn place(&self, path: &str) -> anyhow::Result<PathBuf> {
        self.tree.place(path)
    }

    /// Adds a file of the given mode. A file below `etc` is a configuration file: an upgrade keeps the user's changes.
    pub fn add(&mut self, path: &str, mode: u32, content: impl AsRef<[u8]>) -> anyhow::Result<()> {
        self.tree.add(path, mode, content)?;
        if path.starts_with("etc/") {
            writeln!(self.configuration, "/{path}")?;
        }
        Ok(())
    }

    /// Adds a copy of a file.
    pub fn copy(&mut self, path: &str, mode: u32, from: &Path) -> anyhow::Result<()> {
        let content = std::fs::read(from).with_context(|| from.display().to_string())?;
        self.add(path, mode, content)
    }

    /// Adds a symbolic link.
    pub fn link(&self, path: &str, target: &str) -> anyhow::Result<()> {
        self.tree.link(path, target)
    }

    /// Adds the licence of the package `name`, where Debian's tools look for it.
    pub fn add_copyright(&mut self, name: &str, text: &str) -> anyhow::Result<()> {
        self.add(&format!("usr/share/doc/{name}/copyright"), 0o644, text)
    }

    /// Adds a maintainer script, such as `postinst`.
    pub fn script(&mut self, name: &str, text: &str) -> anyhow::Result<()> {
        self.add(&format!("DEBIAN/{name}"), 0o755, text)
    }

    /// Packs the tree and removes it. All files get the time `epoch`, in seconds since 1970, so the package's bytes depend on
    /// the content alone. Returns the package's path in `folder`.
    pub fn build(
        mut self,
        control: &Control<'_>,
        folder: &Path,
        epoch: u64,
    ) -> anyhow::Result<PathBuf> {
        let moment = format!("--date=@{epoch}");
        let time = Cmd::new("date").args(["--utc", &moment, "--rfc-email"]).env("LC_ALL", "C");
        let time = time.output(folder)?.map_err(|message| anyhow::anyhow!("date: {message}"))?;
        let changelog = format!("usr/share/doc/{}/changelog", control.name);
        self.add(&changelog, 0o644, control.changelog(time.trim()))?;
        self.tree.compress(&self.place(&changelog)?)?;
        self.add("DEBIAN/control", 0o644, control.text())?;
        if !self.configuration.is_empty() {
            let list = std::mem::take(&mut self.configuration);
            self.add("DEBIAN/conffiles", 0o644, list)?;
        }
        self.tree.open_directories()?;
        self.tree.set_times(epoch)?;
        let package = folder.join(control.file_name());
        let made = Cmd::new("dpkg-deb")
            .args([
                "--root-owner-group".as_ref(),
                "--build".as_ref(),
                self.tree.root().as_os_str(),
                package.as_os_str(),
            ])
            // For directories and links, and for the archive itself.
            .env("SOURCE_DATE_EPOCH", epoch.to_string())
            // Several threads would divide the file differently from computer to computer.
            .env("DPKG_DEB_THREADS_MAX", "1")
            .env_remove("DPKG_DEB_COMPRESSOR_TYPE")
            .env_remove("DPKG_DEB_COMPRESSOR_LEVEL");
        made.output(folder)?.map_err(|message| anyhow::anyhow!("dpkg-deb: {message}"))?;
        self.tree.remove()?;
        Ok(package)
    }
}

/// Returns `true` if this computer can pack a package; otherwise a test that calls it prints why it is skipped.
pub fn is_possible() -> bool {
    let is_there = Cmd::new("dpkg-deb").args(["--version"]).probe();
    if !is_there {
        println!("SKIPPED: dpkg-deb is missing (Debian package dpkg)");
    }
    is_there
}

/// Returns the time of all packed files in seconds since 1970: `SOURCE_DATE_EPOCH`, or that of the last commit.
pub fn epoch(root: &Path) -> anyhow::Result<u64> {
    let given = std::env::var("SOURCE_DATE_EPOCH").ok();
    let text = match given {
        Some(text) => text,
        None => Cmd::new("git").args(["log", "-1", "--format=%ct"]).output(root)?.map_err(
            |message| anyhow::anyhow!("SOURCE_DATE_EPOCH is not set, and git: {message}"),
        )?,
    };
    let no_number = || format!("SOURCE_DATE_EPOCH: {text:?} is no number of seconds");
    text.trim().parse().with_context(no_number)
}

/// Returns the version that the packages of the workspace share.
pub fn workspace_version(root: &Path) -> anyhow::Result<String> {
    let manifest: toml::Table = std::fs::read_to_string(root.join("Cargo.toml"))?.parse()?;
    let version =
        manifest.get("workspace").and_then(|w| w.get("package")?.get("version")?.as_str());
    Ok(version.context("Cargo.toml has no version of the workspace")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_has_each_field_and_indented_description() {
        let control = Control {
            name: "one",
            version: "0.1.0",
            architecture: "all",
            section: "net",
            fields: &[("Depends", "dkms")],
            synopsis: "First line",
            description: &["Second line", "third line."],
        };
        let text = control.text();
        assert!(
            text.starts_with("Package: one\nVersion: 0.1.0\nArchitecture: all\nSection: net\n")
        );
        assert!(
            text.ends_with(
                "\nDepends: dkms\nDescription: First line\n Second line\n third line.\n"
            )
        );
        assert_eq!(control.file_name(), "one_0.1.0_all.deb");
        let changelog = control.changelog("Thu, 01 Jan 1970 00:00:09 +0000");
        assert!(changelog.starts_with("one (0.1.0) unstable; "), "{changelog}");
        assert!(changelog.ends_with(".invalid>  Thu, 01 Jan 1970 00:00:09 +0000\n"), "{changelog}");
    }

    #[test]
    fn packages_of_two_folders_are_equal() {
        if !is_possible() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let control = Control {
            name: "one",
            version: "1",
            architecture: "all",
            section: "net",
            fields: &[],
            synopsis: "One",
            description: &[],
        };
        let made = ["one", "two/deeper"].map(|part| {
            let folder = folder.path().join(part);
            let mut deb = Deb::new(folder.join("tree")).unwrap();
            deb.add("usr/bin/one", 0o755, "#!/bin/sh\n").unwrap();
            deb.link("usr/bin/two", "one").unwrap();
            let package = deb.build(&control, &folder, 1_000_000_000).unwrap();
            let list = Cmd::new("dpkg-deb").args(["--contents".as_ref(), package.as_os_str()]);
            let list = list.env("TZ", "UTC").output(&folder).unwrap().unwrap();
            assert!(list.lines().all(|line| line.contains(" 2001-09-09 ")), "{list}");
            assert!(list.contains("./usr/share/doc/one/changelog.gz"), "{list}");
            std::fs::read(package).unwrap()
        });
        assert!(made[0] == made[1]);
    }

    #[test]
    fn package_holds_its_files_with_modes_and_names_its_configuration() {
        if !is_possible() {
            return;
        }
        let folder = std::env::temp_dir().join(format!("deb-test-{}", std::process::id()));
        let mut deb = Deb::new(folder.join("tree")).unwrap();
        deb.add("usr/bin/one", 0o755, "#!/bin/sh\n").unwrap();
        deb.add("etc/one/one.toml", 0o644, "a = 1\n").unwrap();
        deb.link("usr/bin/two", "one").unwrap();
        let control = Control {
            name: "one",
            version: "1",
            architecture: "all",
            section: "net",
            fields: &[],
            synopsis: "One",
            description: &[],
        };
        let package = deb.build(&control, &folder, 1_000_000_000).unwrap();
        let show = |option: &str| {
            Cmd::new("dpkg-deb")
                .args([option.as_ref(), package.as_os_str()])
                .output(&folder)
                .unwrap()
                .unwrap()
        };
        let contents = show("--contents");
        assert!(contents.contains("-rwxr-xr-x root/root"), "{contents}");
        assert!(contents.contains("./usr/bin/two -> one"), "{contents}");
        assert!(!contents.contains("drwx------"), "{contents}");
        let information = Cmd::new("dpkg-deb").args([
            "--info".as_ref(),
            package.as_os_str(),
            "conffiles".as_ref(),
        ]);
        assert_eq!(information.output(&folder).unwrap().unwrap(), "/etc/one/one.toml\n");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
