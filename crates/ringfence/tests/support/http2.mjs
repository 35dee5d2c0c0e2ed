// HTTP/2 for the tests of egress policies.
//
// http2.mjs serve ADDRESS PORT           serves with cert.pem and key.pem; prints the authority of each request
// http2.mjs log ADDRESS PORT...          serves as well; prints nanoseconds, port, authority, path and version of each request
// http2.mjs fetch2 URL                   prints the page by fetch() over HTTP/2, or fails with the code of the error
// http2.mjs fetch URL...                 prints the page of each URL by fetch(), or the code of the error
// http2.mjs coalesce AUTHORITY OTHER     one connection to AUTHORITY, a request for each of the two

import { readFileSync } from 'node:fs';
import http2 from 'node:http2';

const [mode, ...words] = process.argv.slice(2);
if (mode === 'serve') {
    const files = { cert: readFileSync('cert.pem'), key: readFileSync('key.pem') };
    const server = http2.createSecureServer({ ...files, allowHTTP1: true }, (request, response) => {
        console.log('authority', request.authority ?? request.headers.host, request.httpVersion);
        response.end('page\n');
    });
    server.listen(Number(words[1]), words[0], () => console.log('listening'));
} else if (mode === 'log') {
    const files = { cert: readFileSync('cert.pem'), key: readFileSync('key.pem') };
    for (const port of words.slice(1)) {
        const server = http2.createSecureServer({ ...files, allowHTTP1: true }, (request, response) => {
            const now = BigInt(Math.round((performance.timeOrigin + performance.now()) * 1e3)) * 1000n;
            const authority = request.authority ?? request.headers.host;
            console.log(now.toString(), port, authority, request.url, request.httpVersion);
            response.end('page\n');
        });
        await new Promise((done) => server.listen(Number(port), words[0], done));
    }
    console.log('listening');
} else if (mode === 'fetch2') {
    // The first use of fetch() sets the dispatcher, whose class takes the option.
    await fetch('data:,');
    const Agent = globalThis[Symbol.for('undici.globalDispatcher.1')].constructor;
    try {
        const response = await fetch(words[0], { dispatcher: new Agent({ allowH2: true }) });
        process.stdout.write(await response.text());
    } catch (error) {
        console.log('error', error.cause?.code);
        process.exitCode = 1;
    }
} else if (mode === 'fetch') {
    for (const url of words) {
        try {
            process.stdout.write(await (await fetch(url)).text());
        } catch (error) {
            console.log('error', error.cause?.code);
        }
    }
} else {
    const session = http2.connect(`https://${words[0]}`, { ca: readFileSync('cert.pem') });
    session.on('error', (error) => console.log('error', error.code));
    for (const authority of words) {
        await new Promise((done) => {
            const stream = session.request({ ':path': '/', ':authority': authority });
            stream.on('error', (error) => console.log('error', error.code));
            stream.on('close', done).on('data', (data) => process.stdout.write(data)).end();
        });
    }
    session.close();
}
