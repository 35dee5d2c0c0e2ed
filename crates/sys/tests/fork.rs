//! Children of `fork`: their descriptors and their exit status. `fork` needs a process with one thread, so this
//! program has no test harness.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use ringfence_sys::fork::{fork, has_one_thread};
use ringfence_sys::namespaces::set_inheritable;
use rustix::process::{Pid, WaitOptions, waitpid};

fn null() -> OwnedFd {
    File::open("/dev/null").expect("/dev/null").into()
}

fn is_open(fd: RawFd) -> bool {
    std::fs::symlink_metadata(format!("/proc/self/fd/{fd}")).is_ok()
}

fn status_of(child: Pid) -> Option<i32> {
    waitpid(Some(child), WaitOptions::empty()).expect("a child")?.1.exit_status()
}

/// Returns the number of descriptors that are not as the words say: the number, and `open` or `closed`.
fn count_wrong(given: OwnedFd, words: &[OsString]) -> u8 {
    let is_wrong = |word: &&OsString| {
        let word = word.to_string_lossy();
        let (fd, state) = word.split_once(' ').expect("two words");
        is_open(fd.parse().expect("a number")) != (state == "open")
    };
    let wrong = words.iter().filter(is_wrong).count() + usize::from(!is_open(given.as_raw_fd()));
    u8::try_from(wrong).expect("few")
}

fn child_has_given_and_inheritable_descriptors_only() {
    let (given, inherited, other) = (null(), null(), null());
    let number = given.as_raw_fd();
    set_inheritable(&[inherited.as_raw_fd()], true).expect("set_inheritable");
    let words = [(&inherited, "open"), (&other, "closed")]
        .map(|(fd, state)| OsString::from(format!("{} {state}", fd.as_raw_fd())));
    let child = fork(given, &words, count_wrong).expect("fork");
    assert_eq!(status_of(child), Some(0));
    // The parent gave its descriptor away, and keeps the other ones.
    assert!(!is_open(number) && is_open(other.as_raw_fd()) && is_open(inherited.as_raw_fd()));
}

fn status_of_child_is_that_of_its_function() {
    assert_eq!(status_of(fork(null(), &[], |_, _| 7).expect("fork")), Some(7));
}

fn panic_of_child_stays_in_the_child() {
    std::panic::set_hook(Box::new(|_| {}));
    let child = fork(null(), &[], |_, _| panic!("on purpose")).expect("fork");
    drop(std::panic::take_hook());
    assert_eq!(status_of(child), Some(101));
}

fn main() {
    let tests: [(&str, fn()); 3] = [
        (
            "child_has_given_and_inheritable_descriptors_only",
            child_has_given_and_inheritable_descriptors_only,
        ),
        ("status_of_child_is_that_of_its_function", status_of_child_is_that_of_its_function),
        ("panic_of_child_stays_in_the_child", panic_of_child_stays_in_the_child),
    ];
    if std::env::args().any(|word| word == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return;
    }
    assert!(has_one_thread().expect("/proc"));
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
    println!(
        "test result: ok. {} passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
        tests.len()
    );
}
