//! Kernel's own tests of network drivers (`tools/testing/selftests`): a part of dom0's root file system ([`Part`]) with a
//! part for guests, whose directory `selftests` is the root of a file system of its own.
//! The directory has the tests, with what they need of the kernel's tree in `kernel`, and from Debian's packages Python, iproute2,
//! ethtool, socat and a shell. They are those of the release whose kernel is Linux 6.12: older ones lack options that the tests use.
//!
//! [`Part`]: super::parts::Part

use std::path::Path;

use taskkit::tools::{self, Tool};

use super::apt::{Apt, Package, Release};
use super::build::Build;
use super::cpio::Archive;

/// Source package in the release or its backports.
const SOURCE: &str = "linux-source-6.12";
/// Paths in the kernel's tree. `net/lib` has the libraries of the Python tests, and `csum.c`.
const PATHS: [&str; 9] = [
    "tools/testing/selftests/drivers/net",
    "tools/testing/selftests/net/lib",
    "tools/testing/selftests/net/lib.sh",
    "tools/testing/selftests/net/net_helper.sh",
    "tools/testing/selftests/net/netdevice.sh",
    "tools/testing/selftests/kselftest.h",
    "tools/net/ynl/lib",
    "Documentation/netlink/specs",
    "COPYING",
];
/// Packages of the file system. Their dependencies come with them.
const PACKAGES: [&str; 8] = [
    "bash",
    "busybox-static",
    "ethtool",
    "iperf3",
    "iproute2",
    "iputils-ping",
    "python3-yaml",
    "socat",
];
/// Prefixes of packages that are dependencies only of installations.
const INSTALLERS: [&str; 11] = [
    "adduser",
    "debconf",
    "dpkg",
    "init-system",
    "libfile-find",
    "libnumber",
    "libperl",
    "libtext-",
    "passwd",
    "perl",
    "usrmerge",
];
/// Folders that no test reads.
const PRUNED: [&str; 8] = [
    "etc",
    "var",
    "usr/share",
    "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/security",
    "usr/lib/python3.13/ensurepip",
    "usr/lib/python3.13/idlelib",
    "usr/lib/python3.13/pydoc_data",
];
/// Test program of which the tests need the binary, below the selftests.
const CSUM: &str = "net/lib/csum";
/// Tools beside those of a module's build.
pub(crate) static MORE: &[&Tool] = &[&tools::XZ];

/// Returns the packages of the release with the tests' tools.
pub(crate) fn apt(cache: &Path) -> anyhow::Result<Apt> {
    let other = Release::Trixie.other()?;
    let cache = other.map_or(cache.to_owned(), |release| release.folder(cache));
    Apt::of(other, &cache)
}

/// Returns the packages of the file system.
pub(crate) fn packages(apt: &Apt) -> anyhow::Result<Vec<Package>> {
    let mut packages = apt.closure(&PACKAGES)?;
    packages.retain(|package| !INSTALLERS.iter().any(|prefix| package.name.starts_with(prefix)));
    Ok(packages)
}

/// Adds the file system of the tests to the archive, as a part for guests. The packages are unpacked in `root`.
pub(crate) fn add(
    archive: &mut Archive<Vec<u8>>,
    build: &Build<'_>,
    root: &Path,
) -> anyhow::Result<()> {
    build.unpack_source(SOURCE, &PATHS)?;
    for folder in PRUNED.map(|folder| root.join(folder)).iter().filter(|folder| folder.is_dir()) {
        std::fs::remove_dir_all(folder)?;
    }
    for folder in ["dev", "etc", "proc", "run", "sys", "tmp"] {
        std::fs::create_dir_all(root.join(folder))?;
    }
    if !root.join("bin/sh").exists() {
        std::os::unix::fs::symlink("bash", root.join("bin/sh"))?;
    }
    std::fs::rename(build.folder().join("tree"), root.join("kernel"))?;
    let tests = root.join("kernel/tools/testing/selftests");
    let (program, include) = (tests.join(CSUM), format!("-I{}", tests.display()));
    let (to, from) = (program.display().to_string(), program.with_extension("c"));
    build.run(&["gcc", "-O2", "-static", &include, "-o", &to, &from.display().to_string()])?;

    let mut guest = Archive::new(Vec::new());
    guest.tree("selftests", root)?;
    Ok(archive.file("boot/selftests.cpio", false, &guest.finish()?)?)
}
