//! Debian system of the scenarios, and the programs in it: Podman, RootlessKit, and both programs called `pasta`.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::ValueEnum;
use taskkit::exec::Cmd;
use taskkit::tools::Toolbox;
use vm_lab::build::lock;

use super::Suite;
use crate::new_system::{self, Extent, TRIXIE};

/// Debian release of the system: the first one with a Podman that starts pasta.
const RELEASE: &str = TRIXIE.release;

/// Packages of the system.
const PACKAGES: &[&str] = &[
    "podman",
    "netavark",
    "aardvark-dns",
    "crun",
    "passt",
    "uidmap",
    "fuse-overlayfs",
    "iproute2",
    "curl",
    "python3",
    "procps",
    "iputils-ping",
    "nftables",
    "slirp4netns",
    "rootlesskit",
    "buildah",
    "catatonit",
    // For Podman's own tests, and for images of containers.
    "bats",
    "jq",
    "socat",
    "file",
    "busybox-static",
    "kmod",
    "xz-utils",
    "cpio",
];

/// Packages for virtual machines. They need systemd, which debootstrap cannot configure.
const MACHINES: &[&str] =
    &["qemu-system-x86", "libvirt-daemon", "libvirt-daemon-driver-qemu", "libvirt-clients"];

/// File with the version of a package that is unpacked beside the system.
const VERSION: &str = "version";
/// Name of passt's pesto beside Ringfence's.
const REAL_PESTO: &str = "real-pesto";

/// Packages that are unpacked beside the system: directory in the cache, and name for apt-get.
const BESIDE: &[(&str, &str)] = &[
    ("current", "passt/trixie-backports"),
    ("kernel", "linux-image-cloud-amd64"),
    (OLD_PODMAN, "podman/bookworm libsubid4/bookworm libdevmapper1.02.1/bookworm"),
];
/// Podman of Debian 12, which starts slirp4netns, not pasta.
pub(super) const OLD_PODMAN: &str = "podman-4";

/// Versions of RootlessKit beside Debian's: name in the table, and module.
const ROOTLESSKITS: &[(&str, &str)] = &[
    ("rootlesskit-2.3.6", "github.com/rootless-containers/rootlesskit/v2/cmd/rootlesskit@v2.3.6"),
    ("rootlesskit-3.3.0", "github.com/rootless-containers/rootlesskit/v3/cmd/rootlesskit@v3.3.0"),
];

/// Programs called `pasta`, by their origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Peer {
    /// Ringfence of this repository.
    Ringfence,
    /// The one of Debian's package passt.
    Debian,
    /// The newest one: of the same package in Debian's backports.
    Current,
}

impl Peer {
    pub(super) fn name(self) -> &'static str {
        match self {
            Peer::Ringfence => "ringfence",
            Peer::Debian => "debian",
            Peer::Current => "current",
        }
    }
}

/// Programs that come from outside of the system.
pub(super) struct Programs {
    pub(super) ringfence: PathBuf,
    /// Folder with Podman, and programs that belong to it, that are used in place of Debian's.
    pub(super) podman: Option<PathBuf>,
}

/// Debian system with the programs, ready for scenarios.
pub(super) struct System {
    cache: PathBuf,
    runs: PathBuf,
    /// Programs of [`ROOTLESSKITS`] that could be built.
    kits: Vec<&'static str>,
    outside: Programs,
    /// Held for as long as the system is in use: another process would replace programs and results.
    _lock: File,
}

impl System {
    /// Makes the system in `cache`, as far as it is not there. Waits for other processes that use it.
    pub(super) fn prepare(
        cache: &Path,
        outside: Programs,
        toolbox: &Toolbox,
    ) -> anyhow::Result<System> {
        let lock = lock(cache, "clients")?;
        install_debian(cache, toolbox)?;
        for (folder, package) in BESIDE {
            unpack_beside(cache, folder, package)?;
        }
        let kits =
            ROOTLESSKITS.iter().filter(|(name, module)| build_kit(cache, name, module, toolbox));
        let kits: Vec<_> = kits.map(|(name, _)| *name).collect();
        let runs = cache.join("runs");
        let system = System { cache: cache.to_owned(), runs, kits, outside, _lock: lock };
        for peer in Peer::value_variants() {
            system.lay_programs(*peer)?;
        }
        if system.runs.exists() {
            std::fs::remove_dir_all(&system.runs)?;
        }
        Ok(system)
    }

    /// Puts the programs under test into a directory.
    fn lay_programs(&self, peer: Peer) -> anyhow::Result<()> {
        let folder = self.programs(peer);
        if folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        std::fs::create_dir_all(&folder)?;
        for name in &self.kits {
            std::fs::hard_link(self.cache.join("kits").join(name), folder.join(name))?;
        }
        if peer == Peer::Ringfence {
            copy_into(&self.outside.ringfence, &folder.join("ringfence"))?;
            for name in ["pasta", "passt", "pesto", "slirp4netns"] {
                std::os::unix::fs::symlink("ringfence", folder.join(name))?;
            }
        }
        let old = self.cache.join(OLD_PODMAN);
        copy_into(&old.join("usr/bin/podman"), &folder.join(OLD_PODMAN))?;
        for (below, library) in [("usr/lib", "libsubid.so.4"), ("lib", "libdevmapper.so.1.02.1")] {
            let library = Path::new("x86_64-linux-gnu").join(library);
            let name = library.file_name().unwrap_or_default();
            copy_into(&old.join(below).join(&library), &folder.join(name))?;
        }
        for file in self.podman_files()? {
            copy_into(&file, &folder.join(file.file_name().unwrap_or_default()))?;
        }
        std::fs::hard_link(self.current("pesto"), folder.join(REAL_PESTO))
            .context("pesto of passt in Debian's backports")?;
        if peer == Peer::Current {
            for name in ["pasta", "pasta.avx2", "passt", "passt.avx2", "pesto"] {
                std::fs::hard_link(self.current(name), folder.join(name))
                    .with_context(|| format!("{name} of passt in Debian's backports"))?;
            }
        }
        Ok(())
    }

    /// Returns the programs of another Podman than Debian's.
    fn podman_files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let Some(folder) = &self.outside.podman else { return Ok(vec![]) };
        let has_podman = folder.join("podman").is_file();
        anyhow::ensure!(has_podman, "{} has no file called podman", folder.display());
        let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
        let paths = entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(paths.into_iter().filter(|path| path.is_file()).collect())
    }

    /// Returns the root directory of the system.
    pub(super) fn root(&self) -> PathBuf {
        self.cache.join(RELEASE)
    }

    /// Returns the directory of the programs that come first.
    pub(super) fn programs(&self, peer: Peer) -> PathBuf {
        self.cache.join("programs").join(peer.name())
    }

    /// Returns the path of a program of the newest passt.
    fn current(&self, name: &str) -> PathBuf {
        self.cache.join("current/usr/bin").join(name)
    }

    /// Returns the programs whose scenarios are those of the suite.
    pub(super) fn clients(&self, suite: Suite) -> Vec<String> {
        let of_debian = std::iter::once(suite.name());
        let others: &[&str] = match suite {
            Suite::Rootlesskit => &self.kits,
            Suite::Pesto => &[REAL_PESTO],
            Suite::Podman => &[OLD_PODMAN],
            Suite::Machines | Suite::Namespaces => &[],
        };
        of_debian.chain(others.iter().copied()).map(str::to_owned).collect()
    }

    /// Creates a directory for the results of a scenario.
    pub(super) fn new_run(&self, name: &str) -> anyhow::Result<PathBuf> {
        let folder = self.runs.join(name);
        std::fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    /// Returns the versions of the programs, a line each.
    pub(super) fn versions(&self) -> Vec<String> {
        let inside = |words: &[&str]| {
            let root = self.root();
            let text = Cmd::new("chroot").args([&root]).args(words.iter().copied()).output(&root);
            let text = text.ok().and_then(Result::ok).unwrap_or_default();
            text.lines().next().unwrap_or("(no version)").trim().to_owned()
        };
        let query = |package| {
            let words = ["dpkg-query", "--show", "--showformat", "${Package} ${Version}", package];
            inside(&words)
        };
        let mut versions: Vec<String> =
            ["podman", "netavark", "crun", "rootlesskit", "passt", "qemu-system-x86", "libvirt0"]
                .map(query)
                .into();
        versions.extend(self.kits.iter().map(|name| (*name).to_owned()));
        for (folder, _) in BESIDE {
            let version = std::fs::read_to_string(self.cache.join(folder).join(VERSION));
            versions.extend(version.unwrap_or_default().lines().map(str::to_owned));
        }
        let mut own = vec![self.programs(Peer::Ringfence).join("pasta")];
        own.extend(self.podman_files().unwrap_or_default());
        for program in own {
            let text = Cmd::new(program).args(["--version"]).output(&self.cache);
            versions.push(text.ok().and_then(Result::ok).unwrap_or_default().trim().to_owned());
        }
        versions
    }
}

fn copy_into(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::copy(from, to).with_context(|| from.display().to_string())?;
    Ok(())
}

/// Installs the Debian system. A file records its packages, so that another list makes it anew.
fn install_debian(cache: &Path, toolbox: &Toolbox) -> anyhow::Result<()> {
    let (root, record) = (cache.join(RELEASE), cache.join(format!("{RELEASE}.packages")));
    let all = [PACKAGES, MACHINES].concat().join(",");
    if std::fs::read_to_string(&record).is_ok_and(|text| text == all) {
        return Ok(());
    }
    new_system::install(&root, &TRIXIE, Extent::Minimal, PACKAGES, toolbox)?;
    let script = "printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d && \
        DEBIAN_FRONTEND=noninteractive exec apt-get -qq install --no-install-recommends \"$@\"";
    let installed = Cmd::new("chroot")
        .args([root.as_os_str()])
        .args(["sh", "-c", script, "sh"])
        .args(MACHINES.iter().copied())
        .run(cache)?;
    anyhow::ensure!(installed, "{} cannot be installed", MACHINES.join(", "));
    Ok(std::fs::write(&record, all)?)
}

/// Unpacks packages into a directory of the cache, with the package manager of the system. The package of a kernel
/// names the one to unpack.
fn unpack_beside(cache: &Path, folder: &str, packages: &str) -> anyhow::Result<()> {
    const SCRIPT: &str = r#"
        cd "$(mktemp -d)"
        for suite in trixie-backports bookworm; do
            echo "deb http://deb.debian.org/debian $suite main"
        done >/etc/apt/sources.list.d/beside.list
        apt-get -qq update
        for package in $1; do
            case $package in
                linux-image-*) package=$(apt-cache depends "$package" | sed -n 's/^ *Depends: \(linux-image-[0-9]\)/\1/p') ;;
            esac
            apt-get -qq -o APT::Sandbox::User=root download "$package"
        done
        for file in ./*.deb; do
            dpkg-deb --extract "$file" /beside
            dpkg-deb --showformat='${Package} ${Version}\n' --show "$file" >>/beside/version
        done
        rm /etc/apt/sources.list.d/beside.list
    "#;
    let (root, done) = (cache.join(RELEASE), cache.join(folder));
    if done.exists() {
        return Ok(());
    }
    let beside = root.join("beside");
    if beside.exists() {
        std::fs::remove_dir_all(&beside)?;
    }
    let unpacked = Cmd::new("chroot")
        .args([root.as_os_str()])
        .args(["sh", "-ec", SCRIPT, "sh", packages])
        .run(cache)?;
    anyhow::ensure!(unpacked, "{packages} cannot be unpacked");
    Ok(std::fs::rename(beside, done)?)
}

/// Builds a version of RootlessKit. Returns `false`, after a message, if that is not possible.
fn build_kit(cache: &Path, name: &str, module: &str, toolbox: &Toolbox) -> bool {
    let folder = cache.join("kits");
    let program = folder.join(name);
    if program.exists() {
        return true;
    }
    let new = folder.join("new");
    let installed = Cmd::new("go")
        .args(["install", module])
        .env("PATH", toolbox.path())
        .env("GOBIN", &new)
        .run(cache)
        .unwrap_or(false);
    let is_there = installed && std::fs::rename(new.join("rootlesskit"), &program).is_ok();
    if !is_there {
        println!("SKIPPED {name}: it cannot be built with Go");
    }
    is_there
}
