//! RPM package, made by rpmbuild(8) from files that are there already.
//!
//! The time of the build, the host's name and the settings of the computer are replaced, so two builds in different
//! folders have equal bytes.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::exec::Cmd;

use super::system::{CONFIGURATION, LICENCE, RELEASE, SUMMARY, SystemPackage, URL};

/// Directories that belong to the package, with those in them.
const OWN_FOLDERS: [&str; 5] = [
    "etc/ringfence",
    "usr/libexec/ringfence",
    "usr/share/doc/ringfence",
    "usr/share/licenses/ringfence",
    "usr/share/ringfence",
];

const DESCRIPTION: &str = "\
Ringfence gives a command, a container, a virtual machine or a Xen guest
network interfaces and disks over shared memory. It sees no more of a
guest's memory than what the guest lends to it. It serves in place of
pasta, passt and slirp4netns, and of Xen's netback and blkback.";

/// Scripts of installation and removal. Guests stay connected over a restart of the daemon.
const SCRIPTS: &str = "\
%post
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
    systemctl try-restart ringfence-serve.service || :
fi

%preun
if [ \"$1\" = 0 ]; then
    /usr/share/ringfence/apparmor-profiles remove || :
    if [ -d /run/systemd/system ]; then
        systemctl disable --now ringfence-serve.service || :
    fi
fi

%postun
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
fi
";

/// Returns `true` if this computer can make an RPM package.
pub(super) fn is_possible() -> bool {
    Cmd::new("rpmbuild").args(["--version"]).probe()
}

/// Makes the package in `folder`. Returns its path.
pub(super) fn build(package: &SystemPackage<'_>, folder: &Path) -> anyhow::Result<PathBuf> {
    let tree = package.tree(folder.join("rpm-files"))?;
    let work = folder.join("rpm");
    if work.exists() {
        std::fs::remove_dir_all(&work)?;
    }
    std::fs::create_dir_all(&work)?;
    let spec = work.join("ringfence.spec");
    std::fs::write(&spec, specification(package, &tree.files()?)?)?;
    let define = |name: &str, value: &str| ["--define".to_owned(), format!("{name} {value}")];
    let path =
        |path: &Path| path.to_str().map(str::to_owned).context("a folder's name is not text");
    let made = Cmd::new("rpmbuild")
        .args(["-bb", "--quiet", "--target", "x86_64-linux"])
        .args(define("_topdir", &path(&work)?))
        .args(define("source_tree", &path(tree.root())?))
        .args(define("_buildhost", "localhost"))
        .args(define("use_source_date_epoch_as_buildtime", "1"))
        .args(define("clamp_mtime_to_source_date_epoch", "1"))
        .args(define("_build_id_links", "none"))
        .args(define("_binary_payload", "w19.zstdio"))
        .args(define("_rpmfilename", "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm"))
        // The program is stripped, and the manual pages are compressed.
        .args(define("__os_install_post", "%{nil}"))
        .args(define("debug_package", "%{nil}"))
        .args([spec.as_os_str()])
        .env("SOURCE_DATE_EPOCH", package.epoch.to_string())
        .env("HOME", work.as_os_str());
    made.output(folder)?.map_err(|message| anyhow::anyhow!("rpmbuild: {message}"))?;
    let name = format!("ringfence-{}-{RELEASE}.x86_64.rpm", package.version);
    std::fs::rename(work.join("RPMS").join(&name), folder.join(&name))?;
    std::fs::remove_dir_all(&work)?;
    tree.remove()?;
    Ok(folder.join(name))
}

/// Returns the specification of a package with these files.
fn specification(package: &SystemPackage<'_>, files: &[PathBuf]) -> anyhow::Result<String> {
    let mut text = format!(
        "Name: ringfence\n\
         Version: {}\n\
         Release: {RELEASE}\n\
         Summary: {SUMMARY}\n\
         License: {LICENCE}\n\
         URL: {URL}\n\
         Vendor: The Ringfence developers\n\
         # The program is static.\n\
         AutoReqProv: no\n\n\
         %description\n{DESCRIPTION}\n\n\
         %install\n\
         mkdir -p %{{buildroot}}\n\
         cp -a %{{source_tree}}/. %{{buildroot}}/\n\n\
         {SCRIPTS}\n\
         %files\n\
         %defattr(-,root,root,-)\n",
        package.version
    );
    let own = |folder: &&Path| OWN_FOLDERS.iter().any(|own| folder.starts_with(own));
    let folders: BTreeSet<&Path> =
        files.iter().flat_map(|file| file.ancestors().skip(1).filter(own)).collect();
    for folder in folders {
        writeln!(text, "%dir \"/{}\"", folder.display())?;
    }
    for file in files {
        let path = file.to_str().context("a file's name is not text")?;
        let mark = match path {
            CONFIGURATION => "%config(noreplace) ",
            _ if path.starts_with("usr/share/licenses/") => "%license ",
            _ if path.starts_with("usr/share/doc/") || path.starts_with("usr/share/man/") => {
                "%doc "
            }
            _ => "",
        };
        writeln!(text, "{mark}\"/{path}\"")?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specification_marks_configuration_licences_and_guides() {
        let package = SystemPackage {
            root: Path::new("/"),
            version: "1.2.3",
            program: Path::new("/bin/echo"),
            stripped: b"",
            licences: &[],
            sbom: "",
            epoch: 9,
        };
        let files = [
            "etc/ringfence/ringfence.toml",
            "usr/bin/ringfence",
            "usr/share/doc/ringfence/docs/lab/window.md",
            "usr/share/licenses/ringfence/LICENSE-MIT",
            "usr/share/man/man1/ringfence.1.gz",
        ];
        let text = specification(&package, &files.map(PathBuf::from)).unwrap();
        for line in [
            "Version: 1.2.3",
            "%dir \"/etc/ringfence\"",
            "%dir \"/usr/share/doc/ringfence/docs/lab\"",
            "%config(noreplace) \"/etc/ringfence/ringfence.toml\"",
            "\"/usr/bin/ringfence\"",
            "%license \"/usr/share/licenses/ringfence/LICENSE-MIT\"",
            "%doc \"/usr/share/man/man1/ringfence.1.gz\"",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert!(!text.contains("%dir \"/usr/bin\""), "{text}");
    }
}
