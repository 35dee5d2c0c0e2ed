//! Attacks of a guest's command on sockets of the host's programs, as root and as an ordinary user.
//!
//! A program of the host makes sockets, and moves them in every way that leaves the kernel's list of names without a
//! path to them. The command tries to connect to each.

use std::path::Path;

use crate::require;
use crate::support::needs::Need;
use crate::support::users::Site;
use crate::support::{MOMENT, Running};

/// Program of the host: makes sockets below a directory and waits.
const SERVER: &str = include_str!("../support/host_sockets.py");

/// Connects to every socket below directories. Prints the names of those that answer, then the number of sockets that
/// have a path.
const CONNECT: &str = "import os,socket,stat,sys
answered, there = [], 0
for top in sys.argv[1:]:
    for directory, _, names in os.walk(os.fsencode(top)):
        for name in names:
            path = os.path.join(directory, name)
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                continue
            there += 1
            try:
                os.chdir(directory)
                socket.socket(socket.AF_UNIX).connect(name)
                answered.append(os.path.relpath(path, os.fsencode(top)))
            except OSError:
                pass
for name in sorted(answered):
    print(ascii(os.fsdecode(name)))
print('end')";

/// Starts the program of the host, as the site's user.
fn serve(site: &Site, wrapper: &[&str], act: &str, directory: &Path) -> Running {
    std::fs::create_dir_all(directory).unwrap();
    std::os::unix::fs::chown(directory, Some(site.ids().0), Some(site.ids().1)).unwrap();
    let script = site.lab.file("host_sockets.py");
    std::fs::write(&script, SERVER).unwrap();
    let words = site.wrapper.iter().map(String::as_str).chain(wrapper.iter().copied());
    // `env` looks for the program with the rights of the user.
    let end = ["env", "python3", script.to_str().unwrap(), act, directory.to_str().unwrap()];
    let server = site.lab.spawn(&words.chain(end).collect::<Vec<_>>());
    server.wait_for_output("ready");
    server
}

/// Returns the output of [`CONNECT`] in a guest.
fn connect(site: &Site, wrapper: &[&str], options: &str, directory: &Path) -> String {
    let command = ["python3", "-c", CONNECT, directory.to_str().unwrap()];
    site.run_with(wrapper, options, &command).succeed(MOMENT)
}

#[test]
fn sockets_that_were_moved_are_hidden() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let directory = site.lab.file("moved");
        let _server = serve(&site, &[], "moved", &directory);
        for options in ["", "--as-root", "--ro /"] {
            assert_eq!(connect(&site, &[], options, &directory), "end\n", "{options}");
        }
        let shared = connect(&site, &[], "--share-runtime", &directory);
        assert_eq!(shared.lines().count(), 10, "{shared}");
    }
}

#[test]
fn socket_in_the_directory_of_ssh_is_hidden_and_its_files_stay() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let home = site.lab.file("home");
        let _server = serve(&site, &[], "ssh", &home);
        let variable = format!("HOME={}", home.display());
        let environment = ["env", &variable];
        assert_eq!(connect(&site, &environment, "", &home), "end\n");
        let script = "cat $HOME/.ssh/config; ls $HOME/.ssh/masters";
        let said = site.run_with(&environment, "", &["sh", "-c", script]).succeed(MOMENT);
        assert_eq!(said, "config\n");
        assert_eq!(
            connect(&site, &environment, "--share-runtime", &home),
            "'.ssh/a'\n'.ssh/masters/b'\nend\n"
        );
    }
}

#[test]
fn socket_of_another_network_namespace_is_hidden() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let directory = site.lab.file("container");
        let deep = directory.join("a/b/c");
        std::fs::create_dir_all(&deep).unwrap();
        let unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount"];
        let _server = serve(&site, &unshare, "renamed", &deep);
        assert_eq!(connect(&site, &[], "", &directory), "end\n");
        let shared = connect(&site, &[], "--share-runtime", &directory);
        assert_eq!(shared, "'a/b/c/renamed'\nend\n");
    }
}

#[test]
fn socket_of_a_relative_name_is_hidden() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let directory = site.lab.file("relative");
        let _server = serve(&site, &[], "relative", &directory.join("a/b/c"));
        assert_eq!(connect(&site, &[], "", &directory), "end\n");
        let shared = connect(&site, &[], "--share-runtime", &directory);
        assert_eq!(shared, "'a/b/c/in/here'\nend\n");
    }
}

#[test]
fn directory_with_a_thousand_sockets_needs_one_mount() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let directory = site.lab.file("crowd");
        let _server = serve(&site, &["prlimit", "--nofile=4096:4096"], "crowd", &directory);
        let script = format!("ls {} | wc -l; wc -l < /proc/self/mountinfo", directory.display());
        let guest = site.run("", &["sh", "-c", &script]).finish(MOMENT);
        let numbers: Vec<usize> =
            guest.stdout.split_whitespace().map(|number| number.parse().unwrap()).collect();
        assert!(numbers[0] == 0 && numbers[1] < 250, "{numbers:?}");
        assert!(guest.stderr.contains("crowd is empty for the command"), "{}", guest.stderr);
    }
}

#[test]
fn run_is_the_guests_own_without_sockets_of_then_and_later() {
    require!(Need::Guests, Need::Program("python3", "python3"));
    for site in Site::all() {
        let script = site.lab.file("host_sockets.py");
        std::fs::write(&script, SERVER).unwrap();
        let go = site.lab.file("go");
        let make = format!(
            "mount -t tmpfs none /run && mkdir /run/plain && echo content > /run/plain/file && \
             echo pid > /run/a.pid && ln -s plain /run/link && mkfifo /run/pipe && \
             (python3 {} run /run/service {} > /dev/null 2>&1 &) && \
             while ! test -e /run/service/ready; do sleep 0.1; done && exec \"$@\"",
            script.display(),
            go.display()
        );
        let wrapper = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", &make, "sh"];
        let look = format!(
            "ls /run /run/service; cat /run/plain/file /run/link/file /run/a.pid /run/service/kept; \
             touch {}; while ! test -e {}.done; do sleep 0.1; done; ls /run/service; touch /run/new && echo own",
            go.display(),
            go.display()
        );
        let said = |options| {
            for file in [go.clone(), go.with_extension("done")] {
                let _ = std::fs::remove_file(file);
            }
            site.run_with(&wrapper, options, &["sh", "-c", &look]).finish(MOMENT)
        };
        let finished = said("");
        let words: Vec<&str> = finished.stdout.split_whitespace().collect();
        for word in ["plain", "a.pid", "link", "content", "pid", "kept", "own"] {
            assert!(words.contains(&word), "{word}: {}\n{}", finished.stdout, finished.stderr);
        }
        for word in ["first", "second", "pipe"] {
            assert!(!words.contains(&word), "{word}: {}", finished.stdout);
        }
        let shared = said("--share-runtime").stdout;
        assert!(shared.contains("first") && shared.contains("second"), "{shared}");
    }
}

#[test]
fn private_directories_are_empty_but_for_what_is_named() {
    require!(Need::Guests);
    for site in Site::all() {
        let (home, work) = (site.lab.file("home"), site.lab.file("home/a/work"));
        let named = site.lab.file("home/named");
        for directory in [&home, &work, &named] {
            std::fs::create_dir_all(directory).unwrap();
            std::fs::write(directory.join("file"), "content").unwrap();
            let (user, group) = site.ids();
            std::os::unix::fs::chown(directory, Some(user), Some(group)).unwrap();
        }
        std::fs::write(site.lab.file("home/a/secret"), "secret").unwrap();
        let enter = format!("cd {} && HOME={} exec \"$@\"", work.display(), home.display());
        let wrapper = ["sh", "-c", &enter, "sh"];
        let (home, named) = (home.display(), named.display());
        let script = format!(
            "cat file; echo x > made && echo made; cat {home}/a/secret {home}/file 2>&-; \
             cat {named}/file; (echo x > {named}/new) 2>&- || echo refused; ls /run | grep -c . ; \
             echo x > /tmp/ringfence-private-test && echo own; ls -A /dev/shm | wc -l"
        );
        // A run without the guard has left it.
        let _ = std::fs::remove_file("/tmp/ringfence-private-test");
        let options = format!("--private tmp,run,home --ro {named}");
        let said = site.run_with(&wrapper, &options, &["sh", "-c", &script]).succeed(MOMENT);
        let expected = ["contentmade", "contentrefused"];
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines[..2], expected, "{said}");
        assert!(lines[2].parse::<usize>().unwrap() <= 4, "{said}");
        assert_eq!(lines[3..], ["own", "0"], "{said}");
        assert!(!Path::new("/tmp/ringfence-private-test").exists());
        assert!(work.join("made").exists(), "the working directory is the host's");
    }
}
