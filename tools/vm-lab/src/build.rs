//! Builds from Debian's source packages, for programs that Debian has no package of.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::fs::{FlockOperation, flock};
use taskkit::exec::Cmd;
use taskkit::tools::{self, Tool, Toolbox};

use super::apt::Apt;

/// Tools that a build of Linux needs.
pub(crate) static LINUX_NEEDS: &[&Tool] = &[
    &tools::GCC,
    &tools::MAKE,
    &tools::BISON,
    &tools::FLEX,
    &tools::BC,
    &tools::LIBELF,
    &tools::XZ,
];

/// Waits until no other process builds the product `name` of this cache. It may be there then. The lock ends with the file.
pub fn lock(cache: &Path, name: &str) -> anyhow::Result<File> {
    std::fs::create_dir_all(cache)?;
    let lock = File::create(cache.join(format!("{name}.lock")))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    Ok(lock)
}

/// Tools of this computer for builds.
#[derive(Clone, Copy)]
pub(crate) struct BuildTools<'a> {
    pub(crate) toolbox: &'a Toolbox,
    /// Set if missing tools are installed.
    pub(crate) may_install: bool,
}

impl BuildTools<'_> {
    /// Installs the missing ones of these tools, or fails if that is not permitted.
    pub(crate) fn require(self, needs: &[&'static Tool]) -> anyhow::Result<()> {
        let mut missing = self.toolbox.missing(needs);
        if !missing.is_empty() && self.may_install {
            self.toolbox.install(&missing)?;
            missing = self.toolbox.missing(needs);
        }
        anyhow::ensure!(missing.is_empty(), "{}", tools::how_to_get(&missing));
        Ok(())
    }
}

/// Directory of one build.
pub(crate) struct Build<'a> {
    toolbox: &'a Toolbox,
    folder: PathBuf,
}

impl<'a> Build<'a> {
    /// Creates an empty directory with a directory `tree` in it. Installs or requires the tools in `needs`.
    pub(crate) fn begin(
        folder: PathBuf,
        needs: &[&'static Tool],
        tools: BuildTools<'a>,
    ) -> anyhow::Result<Build<'a>> {
        tools.require(needs)?;
        if folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        std::fs::create_dir_all(folder.join("tree"))?;
        Ok(Build { toolbox: tools.toolbox, folder })
    }

    /// Returns the path of the directory.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs a command in the directory. The error has the last lines of its output.
    pub(crate) fn run(&self, words: &[&str]) -> anyhow::Result<()> {
        let (program, args) = words.split_first().context("a command has a first word")?;
        let command = Cmd::new(*program).args(args.iter().copied());
        let done = command.env("PATH", self.toolbox.path()).output(&self.folder)?;
        done.map(|_| ()).map_err(|message| {
            let tail: Vec<&str> = message.lines().rev().take(10).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            anyhow::anyhow!("{}: {}", words.join(" "), tail.join("\n"))
        })
    }

    /// Runs `make` in `tree` on all processors.
    pub(crate) fn make(&self, words: &[&str]) -> anyhow::Result<()> {
        let jobs = format!("-j{}", std::thread::available_parallelism()?);
        self.run(&[&["make", "-C", "tree", jobs.as_str()], words].concat())
    }

    /// Downloads Debian's package `source` of Linux from the release or its backports, and unpacks in `tree` what is at these
    /// `paths` of it; all of it without any.
    pub(crate) fn unpack_source(&self, source: &str, paths: &[&str]) -> anyhow::Result<()> {
        let package = Apt::backport(source, &self.folder)?;
        self.run(&["dpkg-deb", "--extract", &package, "package"])?;
        let archive = format!("package/usr/src/{source}.tar.xz");
        let paths: Vec<String> = paths.iter().map(|path| format!("{source}/{path}")).collect();
        let words = ["tar", "-xf", &archive, "--strip-components=1", "-C", "tree"];
        let words = words.into_iter().chain(paths.iter().map(String::as_str));
        self.run(&words.collect::<Vec<_>>())?;
        Ok(std::fs::remove_dir_all(self.folder.join("package"))?)
    }

    /// Unpacks all of Debian's package `source` of Linux in `tree`, and enables `options` and no others that can be disabled.
    pub(crate) fn unpack_linux(&self, source: &str, options: &str) -> anyhow::Result<()> {
        self.unpack_source(source, &[])?;
        std::fs::write(self.folder.join("options"), options)?;
        self.make(&["KCONFIG_ALLCONFIG=../options", "allnoconfig"])?;
        self.is_configured("tree/.config", options)
    }

    /// Checks that the configuration at `config` contains every line of `wanted`.
    pub(crate) fn is_configured(&self, config: &str, wanted: &str) -> anyhow::Result<()> {
        let config = std::fs::read_to_string(self.folder.join(config))?;
        for option in wanted.lines() {
            anyhow::ensure!(
                config.lines().any(|line| line == option),
                "this version has no option {option}, or it needs another"
            );
        }
        Ok(())
    }

    /// Copies `product` to the path `to`.
    pub(crate) fn copy(&self, product: &str, to: &Path) -> anyhow::Result<()> {
        // The copy is renamed at the end, so that a file at `to` is always complete.
        let new = to.with_extension("new");
        std::fs::copy(self.folder.join(product), &new)?;
        Ok(std::fs::rename(&new, to)?)
    }

    /// Moves `product` to the path `to` and removes the directory.
    pub(crate) fn keep(self, product: &str, to: &Path) -> anyhow::Result<()> {
        self.copy(product, to)?;
        Ok(std::fs::remove_dir_all(&self.folder)?)
    }
}
