//! Debian and Ubuntu systems that debootstrap installs below the target directory.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use taskkit::exec::Cmd;
use taskkit::tools::Toolbox;

/// Release of a system.
pub(crate) struct System {
    /// Name of the release in its archive.
    pub(crate) release: &'static str,
    /// Package of the headers for the release's kernel.
    pub(crate) headers: &'static str,
    /// Archive that this computer's own list of archives does not have.
    archive: Option<&'static Archive>,
}

/// Archive of packages. debootstrap checks its signature by keys of a package in it.
struct Archive {
    url: &'static str,
    components: &'static str,
    /// Script of debootstrap for all releases of the archive. A debootstrap that is older than a release has no other.
    script: &'static str,
    /// Package with the keys, below the archive's address.
    keys_package: &'static str,
    /// SHA-256 of that package in hexadecimal.
    keys_checksum: &'static str,
    /// File with the keys in that package.
    keys: &'static str,
}

const UBUNTU: Archive = Archive {
    url: "http://archive.ubuntu.com/ubuntu",
    components: "main,universe",
    script: "/usr/share/debootstrap/scripts/gutsy",
    keys_package: "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb",
    keys_checksum: "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8",
    keys: "usr/share/keyrings/ubuntu-archive-keyring.gpg",
};

/// Release "bookworm", which is Debian 12.
pub(crate) const BOOKWORM: System =
    System { release: "bookworm", headers: "linux-headers-amd64", archive: None };
/// Release "trixie", which is Debian 13.
pub(crate) const TRIXIE: System =
    System { release: "trixie", headers: "linux-headers-amd64", archive: None };
/// Release "noble", which is Ubuntu 24.04.
pub(crate) const NOBLE: System =
    System { release: "noble", headers: "linux-headers-generic", archive: Some(&UBUNTU) };

impl System {
    /// Returns the reason for which the system cannot be installed: its archive does not answer.
    pub(crate) fn unreachable(&self) -> Option<String> {
        let Archive { url, .. } = self.archive?;
        let file = format!("{url}/dists/{}/Release", self.release);
        let request = Cmd::new("curl").args(["-sSf", "--head", "--max-time", "20", &file]);
        match request.output(Path::new("/")) {
            Ok(Ok(_)) => None,
            Ok(Err(message)) => Some(format!("{file}: {}", message.trim())),
            Err(error) => Some(format!("curl: {error}")),
        }
    }
}

impl Archive {
    /// Fetches the keys into `folder`. Returns their file.
    fn fetch_keys(&self, folder: &Path) -> anyhow::Result<PathBuf> {
        let url = format!("{}/{}", self.url, self.keys_package);
        let package = folder.join("keys.deb");
        let fetch = Cmd::new("curl").args(["-sSf", "--max-time", "60", "--output"]);
        let fetched = fetch.args([package.as_os_str(), url.as_ref()]).output(folder)?;
        fetched.map_err(|message| anyhow::anyhow!("{url}: {message}"))?;
        let sum = HEXLOWER.encode(&Sha256::digest(std::fs::read(&package)?));
        anyhow::ensure!(
            sum == self.keys_checksum,
            "{url} has SHA-256 {sum} in place of {}: it is not used",
            self.keys_checksum
        );
        let into = folder.join("keys");
        let unpack = Cmd::new("dpkg-deb").args(["--extract".as_ref(), package.as_os_str()]);
        let unpacked = unpack.args([&into]).output(folder)?;
        unpacked.map_err(|message| anyhow::anyhow!("dpkg-deb: {message}"))?;
        Ok(into.join(self.keys))
    }
}

/// Extent of a new system.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Packages with priority `required`, and apt.
    Minimal,
    /// Packages with priority `required` and `important`.
    Standard,
}

/// Installs a system with these packages in a new directory, in place of what is there.
pub(crate) fn install(
    root: &Path,
    system: &System,
    extent: Extent,
    packages: &[&str],
    toolbox: &Toolbox,
) -> anyhow::Result<()> {
    remove(root)?;
    std::fs::create_dir_all(root)?;
    let folder = root.parent().unwrap_or(root);
    // It mounts /proc in the system. After an interruption that mount must not be in the way of the next attempt.
    let mut command = Cmd::new("unshare")
        .args(["--mount", "debootstrap", &format!("--include={}", packages.join(","))])
        .args((extent == Extent::Minimal).then_some("--variant=minbase"));
    if let Some(archive) = system.archive {
        let keys = archive.fetch_keys(folder)?;
        command = command
            .args([&format!("--components={}", archive.components)])
            .args(["--keyring".as_ref(), keys.as_os_str()]);
    }
    let installed = command
        .args([system.release.as_ref(), root.as_os_str()])
        .args(system.archive.into_iter().flat_map(|archive| [archive.url, archive.script]))
        .env("PATH", toolbox.path())
        .run(folder)?;
    anyhow::ensure!(installed, "debootstrap failed: {}/debootstrap has its log", root.display());
    Ok(())
}

/// Removes a directory with all that is in it, if it exists.
pub(crate) fn remove(folder: &Path) -> anyhow::Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    Ok(())
}
