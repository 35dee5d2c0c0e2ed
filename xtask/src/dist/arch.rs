//! Package for Arch Linux: a tarball compressed by Zstandard, with `.PKGINFO` (alpm-package) and `.MTREE` (mtree(5)) in
//! front of the files. pacman(8) installs it. `makepkg` is not needed.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use taskkit::exec::Cmd;
use taskkit::tree::Tree;

use super::system::{CONFIGURATION, LICENCE, RELEASE, SUMMARY, SystemPackage, URL};

/// Packs the package in `folder`. Returns its path.
pub(super) fn build(package: &SystemPackage<'_>, folder: &Path) -> anyhow::Result<PathBuf> {
    let tree = package.tree(folder.join("arch"))?;
    let files = tree.files()?;
    tree.add(".PKGINFO", 0o644, info(package, installed_size(&tree, &files)?))?;
    let mtree = tree.place(".MTREE")?;
    std::fs::write(&mtree, list(&tree, package.epoch)?)?;
    tree.compress(&mtree)?;
    std::fs::rename(tree.root().join(".MTREE.gz"), &mtree)?;
    tree.set_times(package.epoch)?;
    let name = format!("ringfence-{}-{RELEASE}-x86_64.pkg.tar", package.version);
    let archive = folder.join(&name);
    let made = Cmd::new("tar")
        .args(["--create", "--sort=name", "--format=ustar", "--owner=0", "--group=0"])
        .args(["--numeric-owner", "--no-recursion", &format!("--mtime=@{}", package.epoch)])
        .args(["--file".as_ref(), archive.as_os_str()])
        .args(["--directory".as_ref(), tree.root().as_os_str()])
        // pacman reads the description first.
        .args([".PKGINFO", ".MTREE"])
        .args(paths(&tree, &files)?);
    made.output(folder)?.map_err(|message| anyhow::anyhow!("tar: {message}"))?;
    let packed = Cmd::new("zstd")
        // Several threads would divide the file differently from computer to computer.
        .args(["-q", "-f", "-19", "--single-thread", "--rm"])
        .args([archive.as_os_str()])
        .env_remove("ZSTD_CLEVEL")
        .env_remove("ZSTD_NBTHREADS");
    packed.output(folder)?.map_err(|message| anyhow::anyhow!("zstd: {message}"))?;
    tree.remove()?;
    Ok(folder.join(format!("{name}.zst")))
}

/// Returns `.PKGINFO`. `size` is that of the installed files in bytes.
fn info(package: &SystemPackage<'_>, size: u64) -> String {
    let SystemPackage { version, epoch, .. } = package;
    format!(
        "pkgname = ringfence\n\
         pkgbase = ringfence\n\
         xdata = pkgtype=pkg\n\
         pkgver = {version}-{RELEASE}\n\
         pkgdesc = {SUMMARY}\n\
         url = {URL}\n\
         builddate = {epoch}\n\
         packager = The Ringfence developers\n\
         size = {size}\n\
         arch = x86_64\n\
         license = {LICENCE}\n\
         backup = {CONFIGURATION}\n"
    )
}

fn installed_size(tree: &Tree, files: &[PathBuf]) -> anyhow::Result<u64> {
    let mut size = 0;
    for file in files {
        size += tree.root().join(file).symlink_metadata()?.len();
    }
    Ok(size)
}

/// Returns the paths of the files, each directory before its content.
fn paths(tree: &Tree, files: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for file in files {
        let folders = file.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty());
        paths.extend(folders.map(Path::to_owned));
        paths.push(file.clone());
    }
    paths.sort();
    paths.dedup();
    anyhow::ensure!(paths.iter().all(|path| tree.root().join(path).symlink_metadata().is_ok()));
    Ok(paths)
}

/// Returns `.MTREE`: type, mode and checksums of each file. pacman before 6.1 compares by MD5 alone.
fn list(tree: &Tree, epoch: u64) -> anyhow::Result<String> {
    let md5 = md5_sums(tree)?;
    let mut text = "#mtree\n/set type=file uid=0 gid=0 mode=644\n".to_owned();
    for path in paths(tree, &tree.files()?)? {
        let (place, shown) = (tree.root().join(&path), path.display());
        let found = place.symlink_metadata()?;
        let mode = found.permissions().mode() & 0o7777;
        if found.is_dir() {
            writeln!(text, "./{shown} time={epoch}.0 mode={mode:o} type=dir")?;
        } else if found.is_symlink() {
            let target = std::fs::read_link(&place)?;
            let target = target.display();
            writeln!(text, "./{shown} time={epoch}.0 mode=777 type=link link={target}")?;
        } else {
            let sum = HEXLOWER.encode(&Sha256::digest(std::fs::read(&place)?));
            let (size, md5) = (found.len(), md5.get(&path).map_or("", String::as_str));
            let mode = if mode == 0o644 { String::new() } else { format!(" mode={mode:o}") };
            writeln!(
                text,
                "./{shown} time={epoch}.0{mode} size={size} md5digest={md5} sha256digest={sum}"
            )?;
        }
    }
    Ok(text)
}

/// Returns the MD5 sum of each file that is no link, by md5sum(1).
fn md5_sums(tree: &Tree) -> anyhow::Result<HashMap<PathBuf, String>> {
    let is_file = |path: &PathBuf| {
        tree.root().join(path).symlink_metadata().is_ok_and(|found| found.is_file())
    };
    let files: Vec<PathBuf> = tree.files()?.into_iter().filter(is_file).collect();
    // With `--zero`, names are as they are.
    let output = Cmd::new("md5sum").args(["--zero", "--"]).args(&files).output(tree.root())?;
    let output = output.map_err(|message| anyhow::anyhow!("md5sum: {message}"))?;
    let lines = output.split('\0').filter_map(|line| line.split_once("  "));
    Ok(lines.map(|(sum, path)| (PathBuf::from(path), sum.to_owned())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_type_mode_and_checksum_of_each_file() {
        let folder = tempfile::tempdir().unwrap();
        let tree = Tree::new(folder.path().join("tree")).unwrap();
        tree.add("usr/bin/x", 0o755, "x").unwrap();
        tree.link("usr/lib/y", "../bin/x").unwrap();
        tree.open_directories().unwrap();
        let sum = HEXLOWER.encode(&Sha256::digest("x"));
        let expected = format!(
            "#mtree\n/set type=file uid=0 gid=0 mode=644\n\
             ./usr time=9.0 mode=755 type=dir\n\
             ./usr/bin time=9.0 mode=755 type=dir\n\
             ./usr/bin/x time=9.0 mode=755 size=1 md5digest=9dd4e461268c8034f5c8564e155c67a6 sha256digest={sum}\n\
             ./usr/lib time=9.0 mode=755 type=dir\n\
             ./usr/lib/y time=9.0 mode=777 type=link link=../bin/x\n"
        );
        assert_eq!(list(&tree, 9).unwrap(), expected);
    }
}
