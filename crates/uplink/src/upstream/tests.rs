use proptest::prelude::*;

use super::*;

fn settings(kind: ProxyKind, credentials: Option<&str>) -> ProxySettings {
    ProxySettings {
        kind,
        host: "proxy.example".to_owned(),
        port: 3128,
        addresses: vec!["192.0.2.1".parse().unwrap(), "127.0.0.1".parse().unwrap()],
        credentials: credentials.map(|text| Credentials::parse(text).unwrap()),
    }
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

#[test]
fn credentials_are_one_line_and_never_shown() {
    let read = |text: &str| Credentials::parse(text);
    let credentials = read("user:pa:ss\r\n").unwrap();
    assert_eq!((&*credentials.user, &*credentials.password), ("user", "pa:ss"));
    assert!(!format!("{credentials:?}").contains("pa:ss"));
    assert!(!format!("{:?}", settings(ProxyKind::Http, Some("user:secret"))).contains("secret"));
    for text in ["", "user", "a:b\nc:d\n", "a:b\0", "a:b\r\nX: y"] {
        assert_eq!(read(text), Err(CredentialsError::Form), "{text:?}");
    }
    for text in [":b", "a:", &format!("a:{}", "b".repeat(256))] {
        assert_eq!(read(text), Err(CredentialsError::Length), "{text:?}");
    }
}

#[test]
fn proxy_on_the_host_is_at_every_address_of_the_host() {
    let proxy = UpstreamProxy::new(settings(ProxyKind::Http, None), [true, true]);
    let of_host = |ip: IpAddr| ip.is_loopback() || ip == at("192.0.2.7:0").ip();
    for to in ["192.0.2.1:3128", "127.0.0.1:3128", "[::1]:3128", "192.0.2.7:3128"] {
        assert!(proxy.is_at(at(to), of_host), "{to}");
    }
    for to in ["192.0.2.1:80", "127.0.0.1:80", "192.0.2.8:3128"] {
        assert!(!proxy.is_at(at(to), of_host), "{to}");
    }
}

#[test]
fn connection_keeps_the_name_of_its_address_and_never_leads_to_the_proxy() {
    use ringfence_policy::dns::Query;
    let proxy = UpstreamProxy::new(settings(ProxyKind::Http, None), [true, true]);
    let ask = |labels: &[&str]| {
        let mut query = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in labels {
            query.push(u8::try_from(label.len()).unwrap());
            query.extend_from_slice(label.as_bytes());
        }
        query.extend_from_slice(&[0, 0, 1, 0, 1]);
        proxy.substitutes().answer(&Query::parse(&query).unwrap(), Duration::ZERO);
    };
    ask(&["a", "org"]);
    ask(&["Proxy", "example"]);
    let destination = proxy.named(at("198.18.1.0:443"), Duration::ZERO).unwrap();
    assert_eq!(destination.target.to_string(), "a.org:443");
    assert_eq!(destination.name().map(HostName::as_str), Some("a.org"));
    assert!(proxy.named(at("198.18.1.1:443"), Duration::ZERO).is_ok());
    let refused = proxy.named(at("198.18.1.1:3128"), Duration::ZERO);
    assert_eq!(refused.map(|_| ()).unwrap_err(), Refusal::Proxy);
    let unknown = proxy.named(at("198.18.1.2:443"), Duration::ZERO);
    assert_eq!(unknown.map(|_| ()).unwrap_err(), Refusal::NoName);
    assert_eq!(proxy.literal(at("[2001:db8::1]:22")).target.to_string(), "[2001:db8::1]:22");
}

/// Answers that are nearly those of a proxy.
fn answers() -> impl Strategy<Value = Vec<u8>> {
    let word = prop::sample::select(vec![
        &b"HTTP/1.1 200 OK\r\n"[..],
        b"HTTP/1.0 407 No\r\n",
        b"HTTP/1.1 100 \r\n",
        b"A: b\r\n",
        b"\r\n",
        b"\n",
        b"\x05\x00",
        b"\x05\x02",
        b"\x01\x00",
        b"\x05\x00\x00\x01",
        b"\x05\x00\x00\x03\x04",
        b"abcd",
        b"\x00\x50",
    ]);
    let words = prop::collection::vec(word, 0..8).prop_map(|words| words.concat());
    prop_oneof![words, prop::collection::vec(any::<u8>(), 0..64)]
}

proptest! {
    #[test]
    fn answer_in_pieces_reads_as_the_whole(first: u8, answer in answers()) {
        super::fuzzing::proxy_answers(&[&[first][..], &answer].concat());
    }
}
