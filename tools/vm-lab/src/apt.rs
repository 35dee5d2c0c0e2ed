//! Debian packages: download and unpacking without installation, which every user may do.
//!
//! The system's package lists are used if possible. If they were never fetched, or are so old that the archive has
//! no longer their packages, separate lists are fetched below the cache.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::exec::Cmd;

use super::unavailable::Unavailable;

/// Archive of source packages and backports.
const ARCHIVE: &str = "http://deb.debian.org/debian";
/// End of the name of a suite with backports.
const BACKPORTS: &str = "-backports";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Package that can be downloaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Package {
    /// Name for apt-get.
    pub(crate) name: String,
    /// Name of the file, which contains the version.
    pub(crate) file: String,
    /// Size of the file in bytes.
    size: u64,
}

/// Debian releases whose Xen and kernel the machines can boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Release {
    /// Debian 12: Xen 4.17, Linux 6.1
    Bookworm,
    /// Debian 13: Xen 4.20, Linux 6.12
    Trixie,
    /// Debian 13 with its backports: the newest kernel and QEMU
    TrixieBackports,
}

impl Release {
    /// Returns the name of the suite with the newest packages of the release.
    fn suite(self) -> &'static str {
        match self {
            Release::Bookworm => "bookworm",
            Release::Trixie => "trixie",
            Release::TrixieBackports => "trixie-backports",
        }
    }

    fn codename(self) -> &'static str {
        self.suite().trim_end_matches(BACKPORTS)
    }

    /// Returns what the names of the suites have behind the code name.
    fn suffixes(self) -> &'static [&'static str] {
        match self {
            Release::Bookworm | Release::Trixie => &["", "-updates"],
            Release::TrixieBackports => &["", "-updates", BACKPORTS],
        }
    }

    /// Returns the release, unless it is that of this computer, whose package lists serve.
    pub(crate) fn other(self) -> anyhow::Result<Option<Release>> {
        Ok((codename()? != self.suite()).then_some(self))
    }

    /// Returns the directory for packages and images of this release below `cache`.
    pub(crate) fn folder(self, cache: &Path) -> PathBuf {
        cache.join(self.suite())
    }
}

/// Package cache and package lists.
pub(crate) struct Apt {
    /// Directory of the .deb files.
    store: PathBuf,
    /// Directory of the separate package lists.
    lists: PathBuf,
    own_lists: bool,
    /// Options that select the archive's suites instead of the system's.
    suites: Vec<String>,
}

impl Apt {
    /// Creates the package cache below `cache`.
    pub(crate) fn new(cache: &Path) -> Apt {
        let (store, lists) = (cache.join("debs"), cache.join("apt"));
        Apt { store, lists, own_lists: false, suites: vec![] }
    }

    /// Creates the package cache below `cache` for another release than this computer's. Its package lists must have
    /// been fetched, by [`Apt::update`].
    pub(crate) fn of(release: Option<Release>, cache: &Path) -> anyhow::Result<Apt> {
        let mut apt = Apt::new(cache);
        if let Some(release) = release {
            std::fs::create_dir_all(&apt.lists)?;
            let list = apt.lists.join("source.list");
            std::fs::write(&list, sources_list("deb", release.codename(), release.suffixes()))?;
            apt.suites = own_sources(&list);
            apt.suites.push(nothing_installed(&apt.lists)?);
            if release.suffixes().contains(&BACKPORTS) {
                // Without this option apt prefers the release to its backports.
                apt.suites.push(format!("APT::Default-Release={}", release.suite()));
            }
            apt.own_lists = true;
        }
        Ok(apt)
    }

    /// Creates the package cache below `cache` for the release and its backports, which it prefers. Fetches the
    /// package lists: the system's usually have no backports.
    pub(crate) fn backports(cache: &Path) -> anyhow::Result<Apt> {
        let mut apt = Apt { lists: cache.join("apt-backports"), ..Apt::new(cache) };
        std::fs::create_dir_all(&apt.lists)?;
        let codename = codename()?;
        let list = apt.lists.join("source.list");
        std::fs::write(&list, sources_list("deb", &codename, &["", BACKPORTS]))?;
        apt.suites = own_sources(&list);
        apt.suites.push(nothing_installed(&apt.lists)?);
        apt.suites.push(format!("APT::Default-Release={codename}{BACKPORTS}"));
        apt.update()?;
        Ok(apt)
    }

    /// Fetches the separate package lists. All following calls use them.
    pub(crate) fn update(&mut self) -> anyhow::Result<()> {
        println!("fetching Debian's package lists");
        self.own_lists = true;
        std::fs::create_dir_all(self.lists.join("lists/partial"))?;
        std::fs::create_dir_all(self.lists.join("cache/archives/partial"))?;
        let updated = self.command("apt-get", &["update", "-qq"]).output(Path::new("/"))?;
        updated.map(|_| ()).map_err(|message| {
            Unavailable(format!("Debian's package lists cannot be fetched: {}", last(&message)))
                .into()
        })
    }

    /// Returns the result of `work`, which is done again with new package lists if it fails: old lists have packages that
    /// the archive no longer has.
    pub(crate) fn with_lists<T>(
        &mut self,
        work: impl Fn(&Apt) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        work(self).or_else(|_| {
            self.update()?;
            work(self)
        })
    }

    /// Returns the dependencies of `name` whose names start with `prefix`.
    pub(crate) fn depends(&self, name: &str, prefix: &str) -> anyhow::Result<Vec<String>> {
        let printed = self.command("apt-cache", &["depends", name]).output(Path::new("/"));
        let printed = printed.context("apt-cache")?.unwrap_or_default();
        Ok(dependencies(&printed, prefix))
    }

    /// Returns the files of the packages in their newest versions.
    pub(crate) fn resolve(&self, names: &[String]) -> anyhow::Result<Vec<Package>> {
        let words: Vec<&str> = ["download", "--print-uris"]
            .into_iter()
            .chain(names.iter().map(String::as_str))
            .collect();
        let printed = self.command("apt-get", &words).output(Path::new("/"))?;
        let printed = printed.map_err(|message| Unavailable(last(&message)))?;
        names.iter().map(|name| package(&printed, name)).collect()
    }

    /// Returns the files of the packages and of all that they depend on, as if nothing were installed.
    pub(crate) fn closure(&self, names: &[&str]) -> anyhow::Result<Vec<Package>> {
        let status = nothing_installed(&self.lists)?;
        let words = ["-o", &status, "install", "--print-uris", "-qq", "--no-install-recommends"];
        let words: Vec<&str> = words.into_iter().chain(names.iter().copied()).collect();
        let printed = self.command("apt-get", &words).output(Path::new("/"))?;
        let printed = printed.map_err(|message| Unavailable(last(&message)))?;
        let names =
            printed.lines().filter_map(|line| line.split_whitespace().nth(1)?.split('_').next());
        names.map(|name| package(&printed, name)).collect()
    }

    /// Downloads the packages that the cache lacks.
    pub(crate) fn download(&self, packages: &[Package]) -> anyhow::Result<()> {
        std::fs::create_dir_all(&self.store)?;
        let missing: Vec<&str> = packages
            .iter()
            .filter(|package| {
                let file = std::fs::metadata(self.store.join(&package.file));
                file.map(|file| file.len()).ok() != Some(package.size)
            })
            .map(|package| package.name.as_str())
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        println!("downloading {} Debian packages: {}", missing.len(), missing.join(" "));
        let words: Vec<&str> = ["download", "-q"].into_iter().chain(missing).collect();
        let done = self.command("apt-get", &words).output(&self.store)?;
        done.map(|_| ()).map_err(|message| {
            Unavailable(format!("Debian packages cannot be downloaded: {}", last(&message))).into()
        })
    }

    /// Unpacks a package into `root`.
    pub(crate) fn unpack(&self, package: &Package, root: &Path) -> anyhow::Result<()> {
        let file = self.store.join(&package.file);
        let command =
            Cmd::new("dpkg-deb").args(["--extract".as_ref(), file.as_os_str(), root.as_os_str()]);
        let done = command.output(Path::new("/"))?;
        done.map(|_| ()).map_err(|message| anyhow::anyhow!("{}: {message}", file.display()))
    }

    /// Downloads a source package of a release, by default this computer's, into `folder` and returns the name of its
    /// upstream archive. The system's lists usually have no sources, and the archive lacks some sources of security
    /// updates, so the version is the release's.
    pub(crate) fn source_of(
        release: Option<Release>,
        name: &str,
        folder: &Path,
    ) -> anyhow::Result<String> {
        fetch(release, folder, "deb-src", &[""], &["source", "--download-only", name])?;
        only(folder, ".orig.tar.")
    }

    /// Downloads a package of the release or its backports into `folder` and returns the name of its file. The
    /// system's lists usually have no backports.
    pub(crate) fn backport(name: &str, folder: &Path) -> anyhow::Result<String> {
        fetch(None, folder, "deb", &["", BACKPORTS], &["download", name])?;
        only(folder, ".deb")
    }

    fn command(&self, program: &str, words: &[&str]) -> Cmd {
        // By default apt-get downloads as the user _apt, who may not write to the directory.
        let mut options =
            vec!["APT::Sandbox::User=root".to_owned(), "Acquire::Retries=2".to_owned()];
        options.extend(self.suites.iter().cloned());
        if self.own_lists {
            options.push(format!("Dir::State::Lists={}/lists", self.lists.display()));
            options.push(format!("Dir::Cache={}/cache", self.lists.display()));
        }
        let options = options.into_iter().flat_map(|option| ["-o".to_owned(), option]);
        Cmd::new(program).args(options).args(words.iter().copied()).env("LC_ALL", "C")
    }
}

/// Runs apt-get in `folder` with package lists that it fetches into `folder`: the lists of the release with each
/// of the suffixes.
fn fetch(
    release: Option<Release>,
    folder: &Path,
    kind: &str,
    suffixes: &[&str],
    words: &[&str],
) -> anyhow::Result<()> {
    let list = folder.join("source.list");
    let codename = release.map_or_else(codename, |release| Ok(release.codename().to_owned()))?;
    std::fs::write(&list, sources_list(kind, &codename, suffixes))?;
    std::fs::create_dir_all(folder.join("lists/partial"))?;
    std::fs::create_dir_all(folder.join("archives/partial"))?;
    let mut options = own_sources(&list);
    options.extend([
        format!("Dir::State::Lists={}/lists", folder.display()),
        format!("Dir::Cache={}", folder.display()),
        "APT::Sandbox::User=root".to_owned(),
    ]);
    for words in [&["update", "-qq"][..], words] {
        let options = options.iter().flat_map(|option| ["-o", option]);
        let command = Cmd::new("apt-get").args(options).args(words.iter().copied());
        let done = command.env("LC_ALL", "C").output(folder)?;
        done.map_err(|message| Unavailable(format!("{}: {}", words.join(" "), last(&message))))?;
    }
    Ok(())
}

/// Returns the code name of this Debian release.
fn codename() -> anyhow::Result<String> {
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let found = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(found.context("/etc/os-release has no VERSION_CODENAME")?.to_owned())
}

/// Returns a list of sources: the release with each of the suffixes.
fn sources_list(kind: &str, codename: &str, suffixes: &[&str]) -> String {
    let line = |suffix| format!("{kind} [signed-by={KEYRING}] {ARCHIVE} {codename}{suffix} main\n");
    suffixes.iter().map(line).collect()
}

/// Returns the options that replace the system's list of sources.
fn own_sources(list: &Path) -> Vec<String> {
    let list = format!("Dir::Etc::SourceList={}", list.display());
    vec![list, "Dir::Etc::SourceParts=/dev/null".to_owned()]
}

/// Returns the option by which nothing counts as installed. Otherwise apt-get would download the installed version of a
/// package, which other sources than the system's may lack. The file it names is made in `lists`.
fn nothing_installed(lists: &Path) -> anyhow::Result<String> {
    std::fs::create_dir_all(lists)?;
    let status = lists.join("nothing-installed");
    std::fs::write(&status, "")?;
    Ok(format!("Dir::State::status={}", status.display()))
}

/// Returns the name of the file in `folder` whose name contains `part`.
fn only(folder: &Path, part: &str) -> anyhow::Result<String> {
    let names = std::fs::read_dir(folder)?.filter_map(Result::ok);
    let mut names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.find(|name| name.contains(part)).context("a package without its archive")
}

/// Returns the names in lines such as `  Depends: NAME`.
fn dependencies(printed: &str, prefix: &str) -> Vec<String> {
    let names = printed.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    names.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect()
}

/// Parses the line `'URL' FILE SIZE DIGEST` of a package, whose file is NAME_VERSION_ARCHITECTURE.deb.
fn package(printed: &str, name: &str) -> anyhow::Result<Package> {
    let found = printed.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let file = words.next().filter(|file| file.split('_').next() == Some(name))?;
        let size = words.next()?.parse().ok()?;
        Some(Package { name: name.to_owned(), file: file.to_owned(), size })
    });
    found.ok_or_else(|| Unavailable(format!("apt knows no package {name}")).into())
}

/// Returns the last line that is not blank.
fn last(text: &str) -> String {
    let mut lines = text.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    lines.next().unwrap_or("apt-get failed").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_release_has_a_folder_and_sources_of_its_own() {
        let cache = tempfile::tempdir().unwrap();
        let folder = Release::Trixie.folder(cache.path());
        let apt = Apt::of(Some(Release::Trixie), &folder).unwrap();
        let list = std::fs::read_to_string(folder.join("apt/source.list")).unwrap();
        assert!(list.lines().all(|line| line.contains(" trixie")), "{list}");
        assert!(apt.store.starts_with(cache.path().join("trixie")));
        assert!(apt.suites.iter().any(|option| option == "Dir::Etc::SourceParts=/dev/null"));
    }

    #[test]
    fn dependencies_are_filtered_by_prefix() {
        let printed = "xen-system-amd64\n  Depends: xen-hypervisor-4.17-amd64\n  Depends: \
                       xen-utils-4.17\n  Suggests: xen-hypervisor-x\n";
        assert_eq!(dependencies(printed, "xen-hypervisor-"), ["xen-hypervisor-4.17-amd64"]);
        assert!(dependencies("", "xen").is_empty());
    }

    #[test]
    fn package_is_found_by_whole_name() {
        let printed = "'http://x/libc6-dev_2.36-9%2b1_amd64.deb' libc6-dev_2.36-9+1_amd64.deb 7 SHA256:00\n\
                       'http://x/libc6_2.36-9%2b1_amd64.deb' libc6_2.36-9+1_amd64.deb 2759320 SHA256:ba\n";
        let found = package(printed, "libc6").unwrap();
        assert_eq!((found.file.as_str(), found.size), ("libc6_2.36-9+1_amd64.deb", 2_759_320));
        let error = package(printed, "libc").unwrap_err();
        assert!(error.is::<Unavailable>());
    }
}
