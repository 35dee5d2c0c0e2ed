//! Required programs: search, installation, and messages about missing ones.
//!
//! Under root on a Debian-like system, apt-get installs exactly the missing packages. Rust components go to
//! the toolchain and, on request, cargo-deny to the target directory, where every user can write. Nothing else is changed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::exec::Cmd;

/// Program, file or toolchain that a step needs.
#[derive(Debug, PartialEq, Eq)]
pub struct Tool {
    /// Name in messages. For a program also its name on the PATH, for another file its whole path.
    pub name: &'static str,
    pub source: Source,
}

/// Sources of a tool, which also decide how it is found.
#[derive(Debug, PartialEq, Eq)]
pub enum Source {
    /// File of this Debian package.
    Debian(&'static str),
    /// Cargo subcommand that is a component of the toolchain.
    Component,
    /// Program of this crate, in this version or a newer one. Its configuration was written for the version.
    Crate { name: &'static str, version: &'static str },
    /// Program that is not installed automatically, because that takes minutes or a toolchain.
    Own { probe: &'static [&'static str], install: &'static str },
}

const fn debian(name: &'static str, package: &'static str) -> Tool {
    Tool { name, source: Source::Debian(package) }
}

/// Source formatter of the toolchain.
pub static RUSTFMT: Tool = Tool { name: "fmt", source: Source::Component };
/// Linter of the toolchain (clippy).
pub static CLIPPY: Tool = Tool { name: "clippy", source: Source::Component };
/// Checker of licences, bans, sources and advisories.
pub static CARGO_DENY: Tool =
    Tool { name: "cargo-deny", source: Source::Crate { name: "cargo-deny", version: "0.20.2" } };
/// Driver of the fuzz targets.
pub static CARGO_FUZZ: Tool = Tool {
    name: "cargo-fuzz",
    source: Source::Own {
        probe: &["cargo-fuzz", "--version"],
        install: "cargo install --locked cargo-fuzz",
    },
};
/// Maker of the documentation's site.
pub static MDBOOK: Tool = Tool {
    name: "mdbook",
    source: Source::Own {
        probe: &["mdbook", "--version"],
        install: "cargo install --locked mdbook",
    },
};
/// Toolchain with the sanitizers that cargo-fuzz needs.
pub static NIGHTLY: Tool = Tool {
    name: "a nightly toolchain",
    source: Source::Own {
        probe: &["rustup", "run", "nightly", "rustc", "--version"],
        install: "rustup toolchain install nightly --profile minimal",
    },
};
/// Emulator of the machines of `cargo xtask vm`.
pub static QEMU: Tool = debian("qemu-system-x86_64", "qemu-system-x86");
/// Decompressor of Debian's kernel image.
pub static XZ: Tool = debian("xz", "xz-utils");
/// Compressor of the Arch package, decompressor of later kernel images.
pub static ZSTD: Tool = debian("zstd", "zstd");
/// Packer of the Python wheel.
pub static ZIP: Tool = debian("zip", "zip");
/// Builder of the RPM package.
pub static RPMBUILD: Tool = debian("rpmbuild", "rpm");
/// Checker of RPM packages.
pub static RPMLINT: Tool = debian("rpmlint", "rpmlint");
/// Checker of Debian packages.
pub static LINTIAN: Tool = debian("lintian", "lintian");
/// Compiler of the SELinux policy.
pub static CHECKMODULE: Tool = debian("checkmodule", "checkpolicy");
/// Packer of the SELinux policy.
pub static SEMODULE_PACKAGE: Tool = debian("semodule_package", "semodule-utils");
/// Compiler for the hypervisor and the kernel.
pub static GCC: Tool = debian("gcc", "gcc");
/// Build tool for the hypervisor and the kernel.
pub static MAKE: Tool = debian("make", "make");
/// Parser generator for the hypervisor and the kernel.
pub static BISON: Tool = debian("bison", "bison");
/// Lexer generator for the hypervisor and the kernel.
pub static FLEX: Tool = debian("flex", "flex");
/// Interpreter for the hypervisor's build scripts.
pub static PYTHON3: Tool = debian("python3", "python3");
/// Tool that applies the hooks of grant windows to Xen's source.
pub static PATCH: Tool = debian("patch", "patch");
/// Calculator for the kernel's build scripts.
pub static BC: Tool = debian("bc", "bc");
/// Header of libelf for the kernel's build.
pub static LIBELF: Tool = debian("/usr/include/libelf.h", "libelf-dev");
/// Installer of the Debian system of `cargo xtask clients`.
pub static DEBOOTSTRAP: Tool = debian("debootstrap", "debootstrap");
/// Programs that the step `local` runs, inside guests, around them and on disks.
pub static LOCAL_PROGRAMS: [Tool; 37] = [
    debian("ip", "iproute2"),
    debian("iperf3", "iperf3"),
    debian("curl", "curl"),
    debian("python3", "python3"),
    debian("ping", "iputils-ping"),
    debian("ethtool", "ethtool"),
    debian("ps", "procps"),
    debian("setpriv", "util-linux"),
    debian("perf", "linux-perf"),
    debian("nbdkit", "nbdkit"),
    debian("nbdinfo", "libnbd-bin"),
    debian("nbdcopy", "libnbd-bin"),
    debian("nbdfuse", "nbdfuse"),
    debian("fusermount3", "fuse3"),
    debian("qemu-nbd", "qemu-utils"),
    debian("qemu-img", "qemu-utils"),
    debian("fio", "fio"),
    debian("mkfs.ext4", "e2fsprogs"),
    debian("e2fsck", "e2fsprogs"),
    debian("debugfs", "e2fsprogs"),
    debian("losetup", "mount"),
    debian("blockdev", "util-linux"),
    debian("openssl", "openssl"),
    debian("qemu-storage-daemon", "qemu-system-common"),
    debian("dnsmasq", "dnsmasq-base"),
    debian("dig", "bind9-dnsutils"),
    debian("git", "git"),
    debian("nghttpd", "nghttp2-server"),
    debian("busybox", "busybox"),
    debian("wget", "wget"),
    debian("node", "nodejs"),
    debian("go", "golang-go"),
    debian("pip", "python3-pip"),
    debian("gtlsclient", "ngtcp2-client"),
    debian("gtlsserver", "ngtcp2-server"),
    debian("iodined", "iodine"),
    debian("ssh", "openssh-client"),
];

/// Time in seconds that apt-get waits for the lock of another package manager.
const LOCK_SECONDS: u32 = 600;

/// Search and installation of tools.
pub struct Toolbox {
    /// Root of the repository.
    root: PathBuf,
    /// Directory in which cargo-deny is installed if the user has none.
    tools: PathBuf,
    /// PATH of the commands: `tools`, the user's directories, then the administrator's, where Debian has
    /// `ethtool` but which users do not search.
    path: OsString,
    /// Set if this process is root.
    pub is_root: bool,
}

impl Toolbox {
    /// Creates a toolbox that installs below `target`.
    pub fn new(root: &Path, target: &Path) -> Toolbox {
        let tools = target.join("tools");
        let user = std::env::var_os("PATH").unwrap_or_default();
        let mut directories = vec![tools.join("bin")];
        directories.extend(std::env::split_paths(&user));
        directories.extend(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from));
        // The name of a directory on a PATH cannot contain a colon. Then the user's PATH is used.
        let path = std::env::join_paths(directories).unwrap_or(user);
        let is_root = rustix::process::geteuid().is_root();
        Toolbox { root: root.to_path_buf(), tools, path, is_root }
    }

    /// Returns the PATH of the commands.
    pub fn path(&self) -> &OsString {
        &self.path
    }

    /// Returns `true` if the tool is installed and works.
    pub fn has(&self, tool: &Tool) -> bool {
        match tool.source {
            Source::Debian(_) => self.find(tool.name).is_some(),
            Source::Crate { version, .. } => {
                let printed = self.command(&[tool.name, "--version"]).output(&self.root);
                printed.is_ok_and(|text| text.is_ok_and(|text| at_least(&text, version)))
            }
            Source::Component => Cmd::cargo().args([tool.name, "--version"]).probe(),
            Source::Own { probe, .. } => self.command(probe).probe(),
        }
    }

    /// Returns the missing tools of `wanted`.
    pub fn missing(&self, wanted: &[&'static Tool]) -> Vec<&'static Tool> {
        wanted.iter().copied().filter(|tool| !self.has(tool)).collect()
    }

    /// Installs the tools in `missing` as far as possible, but builds none from source. The caller searches again for
    /// the missing ones.
    pub fn install(&self, missing: &[&'static Tool]) -> std::io::Result<()> {
        let mut wanted = packages(missing);
        // Later releases of Debian have packages of such programs.
        wanted.extend(missing.iter().filter_map(|tool| match tool.source {
            Source::Crate { name, .. } => (self.is_root && self.is_available(name)).then_some(name),
            _ => None,
        }));
        self.install_packages(&wanted)?;
        for tool in missing {
            if tool.source == Source::Component && self.find("rustup").is_some() {
                let component = component_name(tool);
                self.command(&["rustup", "component", "add", component]).run(&self.root)?;
            }
        }
        Ok(())
    }

    /// Builds those of the tools in `missing` from source that are crates, which takes minutes.
    pub fn build(&self, missing: &[&'static Tool]) -> std::io::Result<()> {
        for tool in missing {
            match tool.source {
                Source::Crate { name, version } => {
                    println!("{name} is not installed: building it below the target directory");
                    let root = self.tools.as_os_str();
                    let build = self.tools.join("build");
                    let installed = Cmd::cargo()
                        .args(["install", "--locked", name, "--version", version, "--root"])
                        .args([root])
                        .env("CARGO_TARGET_DIR", &build)
                        .run(&self.root)?;
                    // After a failure the build directory stays, so the next attempt continues there.
                    if installed {
                        std::fs::remove_dir_all(&build)?;
                    }
                }
                Source::Debian(_) | Source::Component | Source::Own { .. } => {}
            }
        }
        Ok(())
    }

    /// Installs Debian packages. apt waits for the lock of another package manager.
    fn install_packages(&self, packages: &[&str]) -> std::io::Result<()> {
        if packages.is_empty() || !self.is_root || self.find("apt-get").is_none() {
            return Ok(());
        }
        println!(
            "apt-get waits up to {} min if another package manager is at work",
            LOCK_SECONDS / 60
        );
        let lock = format!("DPkg::Lock::Timeout={LOCK_SECONDS}");
        let apt = |words: &[&str]| {
            self.command(&["apt-get", "-o", &lock])
                .args(words.iter().copied())
                .env("DEBIAN_FRONTEND", "noninteractive")
                .run(&self.root)
        };
        let install =
            |names: &[&str]| apt(&[&["install", "-y", "--no-install-recommends"], names].concat());
        if install(packages)? {
            return Ok(());
        }
        // Usually the package list is old, or was never fetched.
        if !apt(&["update"])? {
            println!("the package list cannot be fetched: tests that need more are SKIPPED");
            return Ok(());
        }
        // One unknown package must not prevent the others.
        let (known, unknown): (Vec<&str>, Vec<&str>) =
            packages.iter().copied().partition(|package| self.is_available(package));
        if !unknown.is_empty() {
            println!("not available here: {}", unknown.join(", "));
        }
        if !known.is_empty() && !install(&known)? {
            println!("apt-get failed: tests that need one of these packages are SKIPPED");
        }
        Ok(())
    }

    /// Returns `true` if the package list has the package.
    fn is_available(&self, package: &str) -> bool {
        let shown = self.command(&["apt-cache", "show", "--no-all-versions", package]);
        shown.output(&self.root).is_ok_and(|shown| shown.is_ok_and(|text| !text.is_empty()))
    }

    fn command(&self, words: &[&str]) -> Cmd {
        let (program, args) = words.split_first().expect("a command has a first word");
        Cmd::new(*program).args(args.iter().copied()).env("PATH", self.path())
    }

    fn find(&self, program: &str) -> Option<PathBuf> {
        std::env::split_paths(&self.path).map(|dir| dir.join(program)).find(|candidate| {
            let runs = |mode: u32| mode & 0o111 != 0 || program.starts_with('/');
            candidate.metadata().is_ok_and(|file| file.is_file() && runs(file.permissions().mode()))
        })
    }
}

/// Returns `true` if `text`, the name and version that a program printed, has version `wanted` or a newer one.
fn at_least(text: &str, wanted: &str) -> bool {
    let numbers = |version: &str| -> Option<Vec<u64>> {
        let release = version.split(['-', '+']).next()?;
        release.split('.').map(|part| part.parse().ok()).collect()
    };
    let found = text.split_whitespace().find_map(numbers);
    found.is_some_and(|found| Some(found) >= numbers(wanted))
}

/// Returns the Debian packages of `tools`, each once.
fn packages(tools: &[&'static Tool]) -> Vec<&'static str> {
    let mut packages: Vec<&str> = tools
        .iter()
        .filter_map(|tool| match tool.source {
            Source::Debian(package) => Some(package),
            _ => None,
        })
        .collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

/// Returns the component of the toolchain that provides `cargo TOOL`.
fn component_name(tool: &Tool) -> &'static str {
    if tool.name == RUSTFMT.name { "rustfmt" } else { tool.name }
}

/// Returns one line with the missing tools and the commands that install them.
pub fn how_to_get(missing: &[&'static Tool]) -> String {
    let names: Vec<&str> = missing
        .iter()
        .map(|tool| match tool.source {
            Source::Component => component_name(tool),
            _ => tool.name,
        })
        .collect();
    let mut commands: BTreeMap<u8, Vec<String>> = BTreeMap::new();
    let packages = packages(missing);
    if !packages.is_empty() {
        let command = format!("as root: apt-get install {}", packages.join(" "));
        commands.entry(0).or_default().push(command);
    }
    for tool in missing {
        let (rank, command) = match tool.source {
            Source::Debian(_) => continue,
            Source::Component => (1, format!("rustup component add {}", component_name(tool))),
            Source::Crate { name, version } => {
                (2, format!("cargo install --locked {name} --version {version}"))
            }
            Source::Own { install, .. } => (3, install.to_owned()),
        };
        commands.entry(rank).or_default().push(command);
    }
    let commands: Vec<String> = commands.into_values().flatten().collect();
    format!("missing: {}; to get it: {}", names.join(", "), commands.join("; "))
}

/// Gives every user access to /dev/net/tun, as udev's rule does, where udev did not run. Returns a message about
/// it, or `None` if nothing is wrong. To create a TAP a user still needs a capability in the network namespace.
pub fn open_tun(may_change: bool) -> Option<String> {
    const TUN: &str = "/dev/net/tun";
    let device = || std::fs::metadata(TUN).ok().filter(|file| file.file_type().is_char_device());
    if device().is_none() && may_change {
        Cmd::new("modprobe").args(["tun"]).probe();
    }
    let Some(file) = device() else {
        return Some(format!("{TUN} does not exist: load the kernel's tun module (modprobe tun)"));
    };
    let mode = file.permissions().mode() & 0o777;
    if mode & 0o006 == 0o006 {
        return None;
    }
    if !may_change {
        return Some(format!(
            "{TUN} has mode {mode:04o}; udev makes it 0666, but did not run here. Ordinary users \
             need it so: chmod 0666 {TUN} (as root)"
        ));
    }
    let done = std::fs::set_permissions(TUN, std::fs::Permissions::from_mode(0o666));
    Some(match done {
        Ok(()) => format!("{TUN} had mode {mode:04o}: set to 0666, as udev would"),
        Err(error) => format!("{TUN} has mode {mode:04o}, and setting it to 0666 failed: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_to_get_names_missing_tools_and_each_package_once() {
        static AGAIN: Tool = debian("pkill", "procps");
        let ps = &LOCAL_PROGRAMS[6];
        let text = how_to_get(&[ps, &AGAIN, &RUSTFMT, &CARGO_DENY, &NIGHTLY]);
        assert_eq!(
            text,
            "missing: ps, pkill, rustfmt, cargo-deny, a nightly toolchain; to get it: \
             as root: apt-get install procps; rustup component add rustfmt; \
             cargo install --locked cargo-deny --version 0.20.2; \
             rustup toolchain install nightly --profile minimal"
        );
    }

    /// Returns a toolbox whose programs are in `directory`, with a fake apt-get that records its arguments and
    /// fails until it has updated the package list.
    fn toolbox_in(directory: &Path, is_root: bool) -> Toolbox {
        let apt = directory.join("apt-get");
        let script = "#!/bin/sh\necho \"$@\" >> \"${0%/*}/calls\"\n\
                      case $3 in update) : > \"${0%/*}/updated\" ;; esac\n\
                      [ -e \"${0%/*}/updated\" ]\n";
        std::fs::write(&apt, script).unwrap();
        let cache = directory.join("apt-cache");
        std::fs::write(&cache, "#!/bin/sh\n[ $3 != ethtool ] && echo Package: $3\n").unwrap();
        for program in [apt, cache] {
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        Toolbox {
            root: directory.to_path_buf(),
            tools: directory.join("tools"),
            path: directory.into(),
            is_root,
        }
    }

    #[test]
    fn install_by_root_updates_list_and_installs_missing_packages() {
        let directory = tempfile::tempdir().unwrap();
        let toolbox = toolbox_in(directory.path(), true);
        toolbox.install(&[&LOCAL_PROGRAMS[1], &LOCAL_PROGRAMS[0], &NIGHTLY]).unwrap();
        let calls = std::fs::read_to_string(directory.path().join("calls")).unwrap();
        let lock = "-o DPkg::Lock::Timeout=600";
        let install = format!("{lock} install -y --no-install-recommends iperf3 iproute2");
        assert_eq!(calls, format!("{install}\n{lock} update\n{install}\n"));
    }

    #[test]
    fn unknown_package_does_not_prevent_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let toolbox = toolbox_in(directory.path(), true);
        toolbox.install(&[&LOCAL_PROGRAMS[1], &LOCAL_PROGRAMS[5]]).unwrap();
        let calls = std::fs::read_to_string(directory.path().join("calls")).unwrap();
        let last = calls.lines().last().unwrap();
        assert!(last.ends_with("install -y --no-install-recommends iperf3"), "{calls}");
    }

    #[test]
    fn install_by_ordinary_user_installs_no_packages() {
        let directory = tempfile::tempdir().unwrap();
        let toolbox = toolbox_in(directory.path(), false);
        toolbox.install(&[&LOCAL_PROGRAMS[1]]).unwrap();
        assert!(!directory.path().join("calls").exists());
    }

    #[test]
    fn older_version_is_refused() {
        assert!(at_least("cargo-deny 0.20.2\n", "0.20.2"));
        assert!(at_least("cargo-deny 0.100.0 (abc)", "0.20.2"));
        assert!(at_least("cargo-deny 1.0.0-rc.1", "0.20.2"));
        assert!(!at_least("cargo-deny 0.20.1", "0.20.2"));
        assert!(!at_least("cargo-deny", "0.20.2"));
    }

    #[test]
    fn program_is_found_by_executable_file() {
        let toolbox = Toolbox::new(Path::new("/"), Path::new("/nonexistent"));
        assert!(toolbox.has(&debian("sh", "dash")));
        assert!(!toolbox.has(&debian("no-such-program-anywhere", "none")));
        assert!(toolbox.has(&debian("/etc/passwd", "base-passwd")), "what is no program");
        assert!(!toolbox.has(&debian("/etc/no-such-file", "none")));
    }

    #[test]
    fn tool_with_failing_probe_is_missing() {
        static GONE: Tool = Tool {
            name: "gone",
            source: Source::Own { probe: &["no-such-program-anywhere"], install: "nothing" },
        };
        let toolbox = Toolbox::new(Path::new("/"), Path::new("/nonexistent"));
        assert_eq!(toolbox.missing(&[&GONE]), [&GONE]);
    }
}
