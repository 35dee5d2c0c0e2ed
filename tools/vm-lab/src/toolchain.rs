//! Compiler of another Debian release, for kernel modules. The programs in a release's kernel headers need its C library,
//! and the headers are configured for its compiler. So the packages of both are unpacked into a root of their own, in which
//! make runs. Nothing of them is installed.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::exec::Cmd;

use super::apt::{Apt, Release};

/// Packages of a build, beside the headers. Their dependencies, with the compiler, come with them. Only `binutils` has the
/// assembler by the name under which the compiler looks for it.
const PACKAGES: [&str; 10] = [
    "base-files",
    "binutils",
    "coreutils",
    "dash",
    "findutils",
    "grep",
    "libelf1t64",
    "make",
    "mawk",
    "sed",
];
/// Package that the headers depend on, and no build needs.
const IMAGE: &str = "linux-image-";

/// Unpacked root with a compiler and the headers of one kernel.
pub(crate) struct Toolchain {
    root: PathBuf,
    /// Folder of the headers in the root.
    headers: String,
}

impl Toolchain {
    /// Unpacks the packages for the kernel `kernel` below `cache`, unless they are there.
    pub(crate) fn of(release: Release, kernel: &str, cache: &Path) -> anyhow::Result<Toolchain> {
        let root = cache.join(format!("toolchain-{kernel}"));
        let found = Toolchain { root, headers: format!("/usr/src/linux-headers-{kernel}") };
        if found.root.is_dir() {
            return Ok(found);
        }
        let mut apt = Apt::of(Some(release), cache)?;
        let headers = format!("linux-headers-{kernel}");
        let names: Vec<&str> = PACKAGES.into_iter().chain([headers.as_str()]).collect();
        let mut packages = match apt.closure(&names) {
            Ok(packages) => packages,
            Err(_) => {
                apt.update()?;
                apt.closure(&names)?
            }
        };
        packages.retain(|package| !package.name.starts_with(IMAGE));
        apt.download(&packages)?;
        println!("unpacking {} packages of the compiler for Linux {kernel}", packages.len());
        let new = cache.join("toolchain.new");
        if new.exists() {
            std::fs::remove_dir_all(&new)?;
        }
        std::fs::create_dir_all(&new)?;
        packages.iter().try_for_each(|package| apt.unpack(package, &new))?;
        // The installation would make this link.
        std::os::unix::fs::symlink("mawk", new.join("usr/bin/awk"))?;
        std::fs::rename(&new, &found.root)?;
        Ok(found)
    }

    /// Compiles the module whose sources are in `folder`, and leaves it there.
    pub(crate) fn compile(&self, folder: &Path, options: &[&str]) -> anyhow::Result<()> {
        let inside = self.root.join("build");
        if inside.exists() {
            std::fs::remove_dir_all(&inside)?;
        }
        copy(folder, &inside)?;
        // The root's /dev and /proc are empty; those of this computer are mounted for the build alone. objtool reads the
        // limit of its stack in /proc.
        let script = "mount --rbind /dev \"$0/dev\" && mount --rbind /proc \"$0/proc\" && exec chroot \"$0\" \"$@\"";
        let mut words = vec!["--mount"];
        if !rustix::process::geteuid().is_root() {
            words.push("--map-root-user");
        }
        let command = Cmd::new("unshare").args(words).args(["sh", "-c", script]);
        let command = command.args([self.root.as_os_str()]);
        let command =
            command.args(["make", "-C", &self.headers, "M=/build"]).args(options.iter().copied());
        let done = command.env("PATH", "/usr/bin:/usr/sbin:/bin:/sbin").output(folder)?;
        done.map_err(|message| anyhow::anyhow!("make in {}: {message}", self.root.display()))?;
        copy(&inside, folder)?;
        Ok(std::fs::remove_dir_all(&inside)?)
    }
}

/// Copies the files of a folder without its folders.
fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}
