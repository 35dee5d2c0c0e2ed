//! Wheel for Python's package index: a zip archive with the static program, which `pip install` puts among the scripts of the
//! environment. The form is that of "Binary distribution format" (packaging.python.org), as other tools without
//! Python code have it.
//!
//! ```text
//! ringfence-VERSION.data/scripts/ringfence
//! ringfence-VERSION.dist-info/METADATA, WHEEL, licenses/…, sboms/ringfence.cdx.json, RECORD
//! ```

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use data_encoding::BASE64URL_NOPAD;
use sha2::{Digest, Sha256};
use taskkit::tree::Tree;

use super::archive;

/// Systems on which a static program runs: those with glibc, and those with musl.
const PLATFORMS: [&str; 2] = ["manylinux_2_17_x86_64", "musllinux_1_1_x86_64"];

/// Content of a wheel.
pub(super) struct Wheel<'a> {
    pub(super) version: &'a str,
    pub(super) program: &'a [u8],
    /// Text of the project's page on the index, in Markdown.
    pub(super) readme: &'a str,
    /// Names and texts of licences.
    pub(super) licences: &'a [(&'a str, String)],
    /// Bill of materials.
    pub(super) sbom: &'a str,
}

impl Wheel<'_> {
    /// Packs the wheel in `folder`. Returns its path.
    pub(super) fn build(&self, folder: &Path, epoch: u64) -> anyhow::Result<PathBuf> {
        let tree = Tree::new(folder.join("wheel"))?;
        let own = format!("ringfence-{}", self.version);
        let info = format!("{own}.dist-info");
        tree.add(&format!("{own}.data/scripts/ringfence"), 0o755, self.program)?;
        tree.add(&format!("{info}/METADATA"), 0o644, self.metadata())?;
        tree.add(&format!("{info}/WHEEL"), 0o644, tags())?;
        tree.add(&format!("{info}/sboms/ringfence.cdx.json"), 0o644, self.sbom)?;
        for (name, text) in self.licences {
            tree.add(&format!("{info}/licenses/{name}"), 0o644, text)?;
        }
        let record = format!("{info}/RECORD");
        tree.add(&record, 0o644, list(&tree, &record)?)?;
        let wheel = folder.join(format!("{own}-py3-none-{}.whl", PLATFORMS.join(".")));
        archive::zip(&tree, Path::new(&record), &wheel, epoch)?;
        tree.remove()?;
        Ok(wheel)
    }

    fn metadata(&self) -> String {
        let files: String =
            self.licences.iter().map(|(name, _)| format!("License-File: {name}\n")).collect();
        format!(
            "Metadata-Version: 2.4\n\
             Name: ringfence\n\
             Version: {}\n\
             Summary: Network interfaces and disks for commands, containers and virtual machines, without root\n\
             License-Expression: Apache-2.0 OR MIT\n\
             {files}\
             Keywords: network,namespace,sandbox,pasta,container\n\
             Classifier: Environment :: Console\n\
             Classifier: Operating System :: POSIX :: Linux\n\
             Classifier: Topic :: System :: Networking\n\
             Project-URL: Source, https://github.com/ringfence/ringfence\n\
             Requires-Python: >=3.7\n\
             Description-Content-Type: text/markdown\n\n{}",
            self.version, self.readme
        )
    }
}

fn tags() -> String {
    let tags: String =
        PLATFORMS.iter().map(|platform| format!("Tag: py3-none-{platform}\n")).collect();
    format!("Wheel-Version: 1.0\nGenerator: ringfence-xtask\nRoot-Is-Purelib: false\n{tags}")
}

/// Returns the list of files with their checksums and sizes. The list itself has neither.
fn list(tree: &Tree, record: &str) -> anyhow::Result<String> {
    let mut lines = String::new();
    for file in tree.files()? {
        let content = std::fs::read(tree.root().join(&file))?;
        let path = file.to_str().context("names in a wheel are text")?;
        let sum = BASE64URL_NOPAD.encode(&Sha256::digest(&content));
        lines.push_str(&format!("{path},sha256={sum},{}\n", content.len()));
    }
    Ok(format!("{lines}{record},,\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use taskkit::exec::Cmd;

    fn build(folder: &Path) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        let wheel = Wheel {
            version: "1.2.3",
            program: b"#!/bin/sh\necho ringfence 1.2.3\n",
            readme: "# Ringfence\n",
            licences: &[("LICENSE-MIT", "Permission\n".to_owned())],
            sbom: "{}\n",
        };
        wheel.build(folder, 1_000_000_000).unwrap()
    }

    /// Returns the reason for which this computer cannot pack a wheel.
    fn is_possible() -> bool {
        let is_there = Cmd::new("zip").args(["-v"]).probe();
        if !is_there {
            println!("SKIPPED: zip is missing (Debian package zip)");
        }
        is_there
    }

    #[test]
    fn wheels_of_one_content_are_equal_and_end_with_the_record() {
        if !is_possible() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let wheels = ["one", "two/deeper"].map(|part| build(&folder.path().join(part)));
        let name = "ringfence-1.2.3-py3-none-manylinux_2_17_x86_64.musllinux_1_1_x86_64.whl";
        assert_eq!(wheels[0].file_name().unwrap(), name);
        assert!(std::fs::read(&wheels[0]).unwrap() == std::fs::read(&wheels[1]).unwrap());
        // `unzip` may be missing; the names are in the archive as they are.
        let bytes = std::fs::read(&wheels[0]).unwrap();
        let place = |text: &str| {
            let found = bytes.windows(text.len()).position(|window| window == text.as_bytes());
            found.unwrap_or_else(|| panic!("{text} is not in the archive"))
        };
        let program = place("ringfence-1.2.3.data/scripts/ringfence");
        let record = place("ringfence-1.2.3.dist-info/RECORD");
        assert!(program < place("ringfence-1.2.3.dist-info/METADATA") && place("sboms/") < record);
    }

    #[test]
    fn installed_wheel_has_an_executable_program() {
        if !is_possible() {
            return;
        }
        if !Cmd::new("python3").args(["-m", "pip", "--version"]).probe() {
            println!("SKIPPED: pip is missing (Debian package python3-pip)");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let wheel = build(folder.path());
        let into = folder.path().join("environment");
        let installed = Cmd::new("python3")
            .args(["-m", "pip", "install", "--no-index", "--quiet", "--disable-pip-version-check"])
            .args(["--prefix".as_ref(), into.as_os_str(), wheel.as_os_str()])
            .env("PIP_ROOT_USER_ACTION", "ignore")
            .output(folder.path())
            .unwrap();
        installed.unwrap_or_else(|message| panic!("pip: {message}"));
        let said = Cmd::new(into.join("bin/ringfence")).output(folder.path()).unwrap().unwrap();
        assert_eq!(said, "ringfence 1.2.3\n");
    }

    #[test]
    fn record_lists_files_with_checksums_and_itself_without() {
        let folder = tempfile::tempdir().unwrap();
        let tree = Tree::new(folder.path().join("tree")).unwrap();
        tree.add("a", 0o644, "").unwrap();
        let record = list(&tree, "RECORD").unwrap();
        let empty = "a,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n";
        assert_eq!(record, format!("{empty}RECORD,,\n"));
    }
}
