//! RPM packages, made by rpmbuild(8) from files that are there already: the program, and its SELinux policy.
//!
//! The policy (`dist/selinux`) is compiled by checkmodule(8). Its package has copies of the program as `pasta`, `passt` and
//! `pesto`: a link has the type of its target, and these names need types of their own.
//!
//! The time of the build, the host's name and the settings of the computer are replaced, so two builds in different
//! folders have equal bytes.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::exec::Cmd;
use taskkit::tools;
use taskkit::tree::Tree;

use crate::package;

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

const DESCRIPTION_SELINUX: &str = "\
SELinux domains for pasta and passt, and copies of the program with the types
that lead to these domains. Name /usr/libexec/ringfence/selinux where Podman
or libvirt looks for its helpers.";

/// Scripts of the policy's package. A system without SELinux has no semodule.
const SCRIPTS_SELINUX: &str = "\
%post selinux
if command -v semodule >/dev/null; then
    semodule -i /usr/share/selinux/packages/ringfence.pp || :
    restorecon -R /usr/libexec/ringfence/selinux || :
fi

%postun selinux
if [ \"$1\" = 0 ] && command -v semodule >/dev/null; then
    semodule -r ringfence || :
fi
";

/// Directory of the copies of the program, and the compiled policy.
const COPIES: &str = "usr/libexec/ringfence/selinux";
const POLICY: &str = "usr/share/selinux/packages/ringfence.pp";
/// Names that need a type of their own.
const CONFINED: [&str; 3] = ["pasta", "passt", "pesto"];

const DEVELOPERS: &str = "The Ringfence developers <dev@ringfence.invalid>";
const GROUP: &str = "System Environment/Daemons";

/// Returns `true` if this computer can compile the SELinux policy.
pub(super) fn has_policy_compiler() -> bool {
    // Both print their usage with another status than 0.
    let is_there = |name: &str| Cmd::new("sh").args(["-c", &format!("command -v {name}")]).probe();
    is_there("checkmodule") && is_there("semodule_package")
}

/// Adds the policy and the copies of the program.
fn add_policy(package: &SystemPackage<'_>, tree: &Tree, work: &Path) -> anyhow::Result<()> {
    let sources = package.root.join("dist/selinux");
    let (module, policy) = (work.join("ringfence.mod"), tree.place(POLICY)?);
    let compile = Cmd::new("checkmodule").args([
        "-M".as_ref(),
        "-m".as_ref(),
        "-o".as_ref(),
        module.as_os_str(),
        sources.join("ringfence.te").as_os_str(),
    ]);
    let pack = Cmd::new("semodule_package").args([
        "-o".as_ref(),
        policy.as_os_str(),
        "-m".as_ref(),
        module.as_os_str(),
        "-f".as_ref(),
        sources.join("ringfence.fc").as_os_str(),
    ]);
    for (name, command) in [("checkmodule", compile), ("semodule_package", pack)] {
        command.output(work)?.map_err(|message| anyhow::anyhow!("{name}: {message}"))?;
    }
    for name in CONFINED {
        tree.add(&format!("{COPIES}/{name}"), 0o755, package.stripped)?;
    }
    tree.open_directories()?;
    tree.set_times(package.epoch)
}

/// Returns `true` if this computer can make an RPM package.
pub(super) fn is_possible() -> bool {
    Cmd::new("rpmbuild").args(["--version"]).probe()
}

/// Makes the packages in `folder`. Returns their paths.
pub(super) fn build(package: &SystemPackage<'_>, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    // The scripts of rpmbuild split paths at blanks, which those of the repository may have.
    let temporary = tempfile::Builder::new().prefix("ringfence-rpm-").tempdir()?;
    let work = temporary.path();
    let tree = package.tree(work.join("files"))?;
    let mut names = vec!["ringfence"];
    if has_policy_compiler() {
        add_policy(package, &tree, work)?;
        names.push("ringfence-selinux");
    } else {
        println!(
            "checkmodule or semodule_package is missing (Debian packages checkpolicy, semodule-utils): no SELinux policy"
        );
    }
    let spec = work.join("ringfence.spec");
    std::fs::write(&spec, specification(package, &tree.files()?, &day(package.epoch)?)?)?;
    let define = |name: &str, value: &str| ["--define".to_owned(), format!("{name} {value}")];
    let path =
        |path: &Path| path.to_str().map(str::to_owned).context("a folder's name is not text");
    let made = Cmd::new("rpmbuild")
        .args(["-bb", "--quiet", "--target", "x86_64-linux"])
        .args(define("_topdir", &path(work)?))
        .args(define("source_tree", &path(tree.root())?))
        .args(define("_buildhost", "localhost"))
        .args(define("use_source_date_epoch_as_buildtime", "1"))
        .args(define("source_date_epoch_from_changelog", "0"))
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
    let mut made = Vec::new();
    for name in names {
        let file = format!("{name}-{}-{RELEASE}.x86_64.rpm", package.version);
        std::fs::copy(work.join("RPMS").join(&file), folder.join(&file))?;
        made.push(folder.join(file));
    }
    Ok(made)
}

/// Returns a moment, in seconds since 1970, as the day of a changelog.
fn day(epoch: u64) -> anyhow::Result<String> {
    let moment = format!("--date=@{epoch}");
    let output = Cmd::new("date")
        .args(["--utc", &moment, "+%a %b %d %Y"])
        .env("LC_ALL", "C")
        .output(Path::new("/"))?;
    Ok(output.map_err(|message| anyhow::anyhow!("date: {message}"))?.trim().to_owned())
}

/// Checks packages by rpmlint(1), without its rules that do not apply (`dist/rpmlint.toml`). Returns `false` after an error.
pub(super) fn lint(root: &Path, packages: &[PathBuf]) -> anyhow::Result<bool> {
    let packages = packages.iter().filter(|file| file.extension().is_some_and(|e| e == "rpm"));
    let packages: Vec<&PathBuf> = packages.collect();
    if packages.is_empty() {
        println!("SKIPPED: rpmlint (no package was made)");
        return Ok(true);
    }
    let config = root.join("dist/rpmlint.toml");
    let options = ["--config".as_ref(), config.as_os_str()];
    package::lint(root, "rpmlint", &tools::RPMLINT, &options, &packages)
}

/// Returns `true` for a file of the SELinux policy's package.
fn is_of_policy(file: &Path) -> bool {
    file.starts_with(COPIES) || file == Path::new(POLICY)
}

/// Returns the specification of a package with these files.
fn specification(
    package: &SystemPackage<'_>,
    files: &[PathBuf],
    day: &str,
) -> anyhow::Result<String> {
    let (of_policy, files): (Vec<&PathBuf>, Vec<&PathBuf>) =
        files.iter().partition(|file| is_of_policy(file));
    let policy =
        if of_policy.is_empty() { Default::default() } else { policy_sections(&of_policy) };
    let mut text = format!(
        "Name: ringfence\n\
         Version: {}\n\
         Release: {RELEASE}\n\
         Summary: {SUMMARY}\n\
         License: {LICENCE}\n\
         URL: {URL}\n\
         Vendor: {DEVELOPERS}\n\
         Packager: {DEVELOPERS}\n\
         Group: {GROUP}\n\
         # The program is static.\n\
         AutoReqProv: no\n\n\
         %description\n{DESCRIPTION}\n\n\
         {}\
         %install\n\
         mkdir -p %{{buildroot}}\n\
         cp -a %{{source_tree}}/. %{{buildroot}}/\n\n\
         {SCRIPTS}\n\
         %files\n\
         %defattr(-,root,root,-)\n",
        package.version, policy.0
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
    let version = package.version;
    writeln!(
        text,
        "{}\n%changelog\n* {day} {DEVELOPERS} - {version}-{RELEASE}\n- Version {version}: see CHANGELOG.md.",
        policy.1
    )?;
    Ok(text)
}

/// Returns the declaration of the policy's package, and its scripts and files.
fn policy_sections(files: &[&PathBuf]) -> (String, String) {
    let declaration = format!(
        "%package selinux\n\
         Summary: SELinux policy for Ringfence in the place of pasta and passt\n\
         Group: {GROUP}\n\
         AutoReqProv: no\n\
         Requires: ringfence = %{{version}}-%{{release}}\n\n\
         %description selinux\n{DESCRIPTION_SELINUX}\n\n"
    );
    let files: String = files.iter().map(|file| format!("\"/{}\"\n", file.display())).collect();
    let content = format!(
        "\n{SCRIPTS_SELINUX}\n%files selinux\n%defattr(-,root,root,-)\n%dir \"/{COPIES}\"\n{files}"
    );
    (declaration, content)
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
        let text = specification(&package, &files.map(PathBuf::from), "Thu Jan 01 1970").unwrap();
        for line in [
            "* Thu Jan 01 1970 The Ringfence developers <dev@ringfence.invalid> - 1.2.3-1",
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
        assert!(!text.contains("%dir \"/usr/bin\"") && !text.contains("selinux"), "{text}");

        let files = ["usr/bin/ringfence", "usr/libexec/ringfence/selinux/passt", POLICY];
        let text = specification(&package, &files.map(PathBuf::from), &day(9).unwrap()).unwrap();
        assert!(text.contains("* Thu Jan 01 1970 "), "{text}");
        let (main, policy) = text.split_once("%files selinux\n").unwrap();
        let (_, main) = main.split_once("%files\n").unwrap();
        assert!(main.contains("\"/usr/bin/ringfence\"") && !main.contains("passt"), "{text}");
        assert!(policy.contains("/passt\"") && policy.contains("ringfence.pp\""), "{text}");
        assert!(text.contains("Requires: ringfence = %{version}-%{release}"), "{text}");
        // The packages do not share it.
        assert_eq!(text.matches("AutoReqProv: no").count(), 2, "{text}");
    }
}
