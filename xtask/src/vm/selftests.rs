//! Kernel's own tests of network drivers (`tools/testing/selftests`), for scenarios with `# part: selftests`: a part of
//! dom0's root file system with a part for guests, whose directory `selftests` is the root of a file system of its own.
//! The directory has the tests, with what they need of the kernel's tree in `kernel`, and from Debian's packages Python, iproute2,
//! ethtool, socat and a shell.
//!
//! Tests and packages are downloaded and unpacked; the part is kept until the recipe changes.

use std::path::{Path, PathBuf};

use super::apt::{Apt, Package};
use super::build::{self, Build};
use super::cpio::Archive;
use super::module::NEEDS;
use crate::tools::{self, Tool, Toolbox};

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
const PRUNED: [&str; 9] = [
    "etc",
    "var",
    "usr/share",
    "usr/lib/x86_64-linux-gnu/gconv",
    "lib/x86_64-linux-gnu/security",
    "usr/lib/python3.11/ensurepip",
    "usr/lib/python3.11/idlelib",
    "usr/lib/python3.11/lib2to3",
    "usr/lib/python3.11/pydoc_data",
];
/// Test program of which the tests need the binary, below the selftests.
const CSUM: &str = "net/lib/csum";
/// Tools beside those of a module's build.
static MORE: &[&Tool] = &[&tools::XZ];
/// File name of the part.
const ARCHIVE: &str = "selftests.cpio";

/// Makes the part below `cache`, or finds it there; returns its path.
pub(super) fn archive(
    cache: &Path,
    toolbox: &Toolbox,
    may_install: bool,
) -> anyhow::Result<PathBuf> {
    let _lock = build::lock(cache, "selftests")?;
    let (built, stamp) = (cache.join(ARCHIVE), cache.join("selftests.stamp"));
    let state = [&[SOURCE, CSUM], &PATHS[..], &PACKAGES[..], &INSTALLERS[..], &PRUNED[..]].concat();
    let state = state.join("\n");
    if built.is_file() && std::fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(built);
    }
    println!("making the file system of the kernel's selftests");
    let needs: Vec<&'static Tool> = NEEDS.iter().chain(MORE).copied().collect();
    let build = Build::begin(cache.join("selftests"), &needs, toolbox, may_install)?;
    build.unpack_source(SOURCE, &PATHS)?;
    let root = build.folder().join("root");
    std::fs::create_dir_all(&root)?;
    let (apt, packages) = packages(cache)?;
    packages.iter().try_for_each(|package| apt.unpack(package, &root))?;
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
    add(&mut guest, "selftests", &root)?;
    let mut dom0 = Archive::new(Vec::new());
    dom0.file("boot/selftests.cpio", false, &guest.finish()?)?;
    std::fs::write(build.folder().join(ARCHIVE), dom0.finish()?)?;
    build.keep(ARCHIVE, &built)?;
    std::fs::write(&stamp, state)?;
    Ok(built)
}

/// Adds all files below `from`. Symbolic links stay links.
fn add(archive: &mut Archive<Vec<u8>>, path: &str, from: &Path) -> anyhow::Result<()> {
    archive.directory(path)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (inside, kind) =
            (format!("{path}/{}", entry.file_name().display()), entry.file_type()?);
        if kind.is_symlink() {
            let target = std::fs::read_link(entry.path())?;
            archive.symlink(&inside, &target.to_string_lossy())?;
        } else if kind.is_dir() {
            add(archive, &inside, &entry.path())?;
        } else {
            archive.copy(&inside, &entry.path())?;
        }
    }
    Ok(())
}

/// Downloads the packages, with new lists if the given ones do not do.
fn packages(cache: &Path) -> anyhow::Result<(Apt, Vec<Package>)> {
    let mut apt = Apt::new(cache);
    let packages = download(&apt).or_else(|_| {
        apt.update()?;
        download(&apt)
    })?;
    Ok((apt, packages))
}

fn download(apt: &Apt) -> anyhow::Result<Vec<Package>> {
    let mut packages = apt.closure(&PACKAGES)?;
    packages.retain(|package| !INSTALLERS.iter().any(|prefix| package.name.starts_with(prefix)));
    apt.download(&packages)?;
    Ok(packages)
}
