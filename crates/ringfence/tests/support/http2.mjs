// HTTP/2 for the tests of egress policies.
//
// http2.mjs serve ADDRESS PORT           serves with cert.pem and key.pem; prints the authority of each request
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
